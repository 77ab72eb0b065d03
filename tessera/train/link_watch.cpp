#include "tessera/train/link_watch.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

#include "tessera/core/host.h"
#include "tessera/monitor/links.h"

namespace tessera::train {

LinkWatch::LinkWatch(std::vector<std::string> hosts)
    : hosts_(std::move(hosts)) {}

void LinkWatch::add(const std::vector<monitor::LinkSpeed>& links) {
  for (const monitor::LinkSpeed& link : links) {
    if (hosts_.at(link.from) != hosts_.at(link.to)) continue;
    within_[{link.from, link.to}] = link;
  }
  const auto measured = lines_of(links);
  for (const auto& [hosts, now] : measured) lines_[hosts].last = now;
  const MedianOfOthers others = median_of_others();
  wants_again_ = false;
  for (const auto& [hosts, now] : measured) {
    Line& line = lines_[hosts];
    judge(line, now, line.is_slow ? std::nullopt : usual(line, others));
  }
}

std::vector<monitor::LinkSpeed> LinkWatch::links() const {
  std::vector<monitor::LinkSpeed> within, between;
  for (const auto& [ranks, link] : within_) within.push_back(link);
  for (const auto& [hosts, line] : lines_) between.push_back(line.last.link);
  std::ranges::sort(between, {}, [](const monitor::LinkSpeed& link) {
    return std::pair(link.from, link.to);
  });
  auto all = monitor::slowest_and_median(std::move(within));
  between = monitor::slowest_and_median(std::move(between));
  all.insert(all.end(), between.begin(), between.end());
  return all;
}

MedianOfOthers LinkWatch::median_of_others() const {
  std::vector<double> all;
  for (const auto& [hosts, line] : lines_) {
    if (!line.is_slow) all.push_back(line.last.gbps);
  }
  return MedianOfOthers(all);
}

std::map<LinkWatch::Hosts, LinkWatch::Measured> LinkWatch::lines_of(
    const std::vector<monitor::LinkSpeed>& links) const {
  const auto ends = [this](const monitor::LinkSpeed& link) {
    return std::minmax(hosts_.at(link.from), hosts_.at(link.to));
  };
  std::map<std::string, int64_t> leaving;  // links, by host
  for (const monitor::LinkSpeed& link : links) {
    const auto [one, other] = ends(link);
    if (one == other) continue;
    ++leaving[one];
    ++leaving[other];
  }
  std::map<Hosts, Measured> lines;
  for (const monitor::LinkSpeed& link : links) {
    const auto [one, other] = ends(link);
    if (one == other) continue;
    const auto sharing = std::max(leaving[one], leaving[other]);
    const double gbps = link.gbps * static_cast<double>(sharing);
    Measured& best = lines[{one, other}];
    if (gbps > best.gbps) best = {link, gbps};
  }
  return lines;
}

std::optional<double> LinkWatch::usual(const Line& line,
                                       const MedianOfOthers& others) {
  auto found = others.without(line.last.gbps);
  if (line.earlier.size() >= kFew) {
    found = std::max(found.value_or(0), upper_median(line.earlier));
  }
  return found;
}

void LinkWatch::judge(Line& line, const Measured& now,
                      std::optional<double> usual) {
  if (line.is_slow) {
    line.is_slow = now.gbps < line.expected / 2;
    if (line.is_slow) return;
    line.slow_in_a_row = 0;
  } else if (usual && now.gbps * kTimes < *usual) {
    line.is_slow = ++line.slow_in_a_row == kInARow;
    line.expected = *usual;
    wants_again_ |= !line.is_slow;
    if (!line.is_slow) return;
  } else {
    line.slow_in_a_row = 0;
    line.earlier.push_back(now.gbps);
    if (line.earlier.size() > kMany) line.earlier.erase(line.earlier.begin());
    return;
  }
  tell(line, now);
}

void LinkWatch::tell(const Line& line, const Measured& now) {
  const std::string between = c10::str("links: between ", place(now.link.from),
                                       " and ", place(now.link.to));
  if (!line.is_slow) {
    news_.push_back(
        {false, c10::str(between, " go ", now.gbps, " GB/s again")});
    return;
  }
  news_.push_back(
      {true, c10::str(between, " go ", now.gbps, " GB/s, measured ", kInARow,
                      " times in a row; usual here are ", line.expected, ": ",
                      line.expected / now.gbps,
                      " times as much. Ranks wait for what goes that way. Look "
                      "at the line between these hosts, and at what else it "
                      "carries.")});
}

// "rank 3 (on HOST)".
std::string LinkWatch::place(int64_t rank) const {
  return c10::str("rank ", rank, " (on ", host_name_in(hosts_.at(rank)), ")");
}

}  // namespace tessera::train
