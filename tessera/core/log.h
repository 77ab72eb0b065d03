// One line a message on stderr and, where one is open, in the rank's own log.
//
// Use:     log::info("read ", files.size(), " files")
// Form:    "12:30:01 [rank 3/8 ...] message", in a file with date and zone,
//          "2026-01-31 12:30:01+0100 ..."; warnings and errors are marked.
//          Rank 0 alone shows `info` on the screen; the others write theirs to
//          their log file, so that N ranks do not say a thing N times.
// Threads: any; a line is written whole.
#pragma once

#include <c10/util/StringUtil.h>

#include <string>

namespace tessera::log {

enum class Level { kDebug, kInfo, kWarning, kError };

void write(Level level, const std::string& message);

// In the rank's log file alone: of what others show on the screen.
void note(const std::string& message);

// Also appends every line of this process's rank `rank` to `path`. Several
// ranks may be threads of one process: each names its own file.
void open_rank_file(int rank, const std::string& path);
void close_rank_file(int rank);

template <typename... Args>
void debug(const Args&... args) {
  write(Level::kDebug, c10::str(args...));
}
template <typename... Args>
void info(const Args&... args) {
  write(Level::kInfo, c10::str(args...));
}
template <typename... Args>
void warning(const Args&... args) {
  write(Level::kWarning, c10::str(args...));
}
template <typename... Args>
void error(const Args&... args) {
  write(Level::kError, c10::str(args...));
}

}  // namespace tessera::log
