// What a rank writes to stderr: shown line by line, kept for the verdict.
//
// Rank 0's lines appear as they are; the others' carry "[rank N] " unless they
// name their rank already. A line ends with \n or, for bars, with \r.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "tessera/core/fd.h"

namespace tessera::launch::detail {

class RankOutput {
 public:
  static constexpr size_t kLastLines = 20;

  // `log_file`: "" for none; else every byte is appended there too.
  RankOutput(int64_t rank, const std::string& log_file);

  // Reads what is there, without waiting for what a rank still writes. False:
  // the pipe is closed, nothing more will come.
  bool drain(int pipe);
  void flush();  // shows a last line that has no end
  const std::deque<std::string>& last_lines() const { return last_lines_; }

 private:
  void show(std::string line);

  int64_t rank_;
  Fd log_;
  std::string pending_;  // the beginning of a line
  std::deque<std::string> last_lines_;
};

}  // namespace tessera::launch::detail
