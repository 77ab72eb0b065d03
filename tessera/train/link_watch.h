// Which line between hosts is slower than the others, or than it was.
//
// Links between ranks are measured a round at a time (comm/link.h), and every
// rank knows what was measured, so that all judge alike. What counts is a line,
// from one host to another. Links of one round share what leaves a host: a line
// gave what its best link moved, times the links that the busier of its two
// hosts had in that round. A line is slow where it gave less than a kTimes-th
// of what is usual, kInARow times in a row: of the median of the lines that are
// not slow, as last measured, or of its own one before. A round that looks like
// it is measured again after the next step. Within a host nothing is judged:
// there cores that have other work are all that would be seen.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/monitor/step_record.h"
#include "tessera/train/median.h"
#include "tessera/train/news.h"

namespace tessera::train {

class LinkWatch {
 public:
  static constexpr double kTimes = 4;
  static constexpr int64_t kInARow = 3;
  // Of a line's own past: from how many on it is told from, and how many count.
  static constexpr size_t kFew = 3, kMany = 9;

  // `hosts`: of each rank, as host_identity() has it.
  explicit LinkWatch(std::vector<std::string> hosts);

  // The links of one round.
  void add(const std::vector<monitor::LinkSpeed>& links);
  // RunEnd::links.
  std::vector<monitor::LinkSpeed> links() const;
  // That round is to be measured again after the next step.
  bool wants_again() const { return wants_again_; }
  // That a line has become slow, or is no longer.
  std::vector<News> take_news() { return std::exchange(news_, {}); }

 private:
  using Hosts = std::pair<std::string, std::string>;
  // What a round says of a line: that of its best link.
  struct Measured {
    monitor::LinkSpeed link;
    double gbps = 0;  // of the line, 10^9 bytes a second, as all here
  };
  struct Line {
    Measured last;
    std::vector<double> earlier;  // while it was not slow
    int64_t slow_in_a_row = 0;
    bool is_slow = false;
    double expected = 0;  // of a slow one, which is none with half of it
  };
  // Of the lines that are not slow, as last measured.
  MedianOfOthers median_of_others() const;
  std::map<Hosts, Measured> lines_of(
      const std::vector<monitor::LinkSpeed>& links) const;
  // nullopt: nothing to hold it against. REQUIRES: it is one of `others`.
  static std::optional<double> usual(const Line& line,
                                     const MedianOfOthers& others);
  void judge(Line& line, const Measured& now, std::optional<double> usual);
  // What has become of it.
  void tell(const Line& line, const Measured& now);
  std::string place(int64_t rank) const;

  const std::vector<std::string> hosts_;
  std::map<Hosts, Line> lines_;
  // Of two ranks of one host, as last measured.
  std::map<std::pair<int64_t, int64_t>, monitor::LinkSpeed> within_;
  bool wants_again_ = false;
  std::vector<News> news_;
};

}  // namespace tessera::train
