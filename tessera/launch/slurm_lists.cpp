#include "tessera/launch/slurm_lists.h"

#include <algorithm>
#include <charconv>

#include "tessera/core/error.h"

namespace tessera::launch {
namespace {

// Expansions beyond this are a mistake in the list, not a cluster.
constexpr size_t kMostHosts = size_t{1} << 16;
constexpr int64_t kMostBrackets = 8;  // of one entry
constexpr size_t kShown = 80;         // characters of a list in a message

std::string no_list_of(const std::string& what, const std::string& list) {
  const char* more = list.size() > kShown ? "..." : "";
  return c10::str("launch: '", list.substr(0, kShown), more, "' is no list of ",
                  what, " as Slurm writes it.");
}

// "1-3,07" between brackets.
std::vector<std::string> expand_ranges(const std::string& ranges,
                                       const std::string& whole) {
  std::vector<std::string> out;
  size_t at = 0;
  while (at <= ranges.size()) {
    const size_t comma = std::min(ranges.find(',', at), ranges.size());
    const std::string item = ranges.substr(at, comma - at);
    const size_t dash = std::min(item.find('-'), item.size());
    const std::string low = item.substr(0, dash);
    const std::string high = dash < item.size() ? item.substr(dash + 1) : low;
    const auto from = to_number(low), to = to_number(high);
    TS_CHECK_CONFIG(
        from && to && *from <= *to &&
            static_cast<size_t>(*to - *from) < kMostHosts - out.size(),
        no_list_of("hosts", whole));
    for (int64_t i = *from; i <= *to; ++i) {
      std::string digits = std::to_string(i);
      if (digits.size() < low.size()) {
        digits.insert(0, low.size() - digits.size(), '0');
      }
      out.push_back(digits);
    }
    at = comma + 1;
  }
  return out;
}

// One entry of a host list, with any number of brackets.
std::vector<std::string> expand_entry(const std::string& entry,
                                      const std::string& whole) {
  TS_CHECK_CONFIG(std::count(entry.begin(), entry.end(), '[') <= kMostBrackets,
                  no_list_of("hosts", whole));
  const size_t open = entry.find('[');
  if (open == std::string::npos) {
    TS_CHECK_CONFIG(!entry.empty() && entry.find(']') == std::string::npos,
                    no_list_of("hosts", whole));
    return {entry};
  }
  const size_t close = entry.find(']', open);
  TS_CHECK_CONFIG(close != std::string::npos, no_list_of("hosts", whole));
  const std::string rest = entry.substr(close + 1);
  const auto tails =
      rest.empty() ? std::vector<std::string>{""} : expand_entry(rest, whole);
  const auto heads =
      expand_ranges(entry.substr(open + 1, close - open - 1), whole);
  TS_CHECK_CONFIG(heads.size() <= kMostHosts / tails.size(),
                  no_list_of("hosts", whole));
  std::vector<std::string> out;
  for (const auto& head : heads) {
    for (const auto& tail : tails) {
      out.push_back(entry.substr(0, open) + head + tail);
    }
  }
  return out;
}

}  // namespace

std::optional<int64_t> to_number(const std::string& text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || text.empty() || value < 0) {
    return std::nullopt;
  }
  return value;
}

std::vector<std::string> expand_hosts(const std::string& list) {
  std::vector<std::string> out;
  size_t start = 0;
  int depth = 0;
  for (size_t i = 0; i <= list.size(); ++i) {
    if (i < list.size() && list[i] == '[') ++depth;
    if (i < list.size() && list[i] == ']') --depth;
    if (i < list.size() && (list[i] != ',' || depth != 0)) continue;
    for (auto& host : expand_entry(list.substr(start, i - start), list)) {
      TS_CHECK_CONFIG(out.size() < kMostHosts, no_list_of("hosts", list));
      out.push_back(std::move(host));
    }
    start = i + 1;
  }
  return out;
}

std::vector<int64_t> expand_counts(const std::string& list) {
  std::vector<int64_t> out;
  size_t at = 0;
  while (at <= list.size()) {
    const size_t comma = std::min(list.find(',', at), list.size());
    const std::string item = list.substr(at, comma - at);
    const size_t open = std::min(item.find("(x"), item.size());
    const auto count = to_number(item.substr(0, open));
    std::optional<int64_t> times = 1;
    if (open < item.size()) {
      TS_CHECK_CONFIG(item.back() == ')', no_list_of("counts", list));
      times = to_number(item.substr(open + 2, item.size() - open - 3));
    }
    TS_CHECK_CONFIG(count && times &&
                        static_cast<size_t>(*times) <= kMostHosts - out.size(),
                    no_list_of("counts", list));
    out.insert(out.end(), *times, *count);
    at = comma + 1;
  }
  return out;
}

}  // namespace tessera::launch
