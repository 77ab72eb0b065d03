#include "tessera/launch/detail/rank_output.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/screen.h"

namespace tessera::launch::detail {
namespace {

constexpr size_t kLongestLine = size_t{64} << 10;

bool names_its_rank(const std::string& line, int64_t rank) {
  const std::string name = "[rank " + std::to_string(rank);
  const size_t at = line.find(name);
  if (at == std::string::npos || at + name.size() >= line.size()) return false;
  const char next = line[at + name.size()];
  return next == '/' || next == ']' || next == ' ';
}

// To a file; what cannot be written is left out.
void write_all(int fd, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = write(fd, text.data() + done, text.size() - done);
    if (n >= 0) {
      done += static_cast<size_t>(n);
    } else if (errno != EINTR) {
      return;
    }
  }
}

}  // namespace

RankOutput::RankOutput(int64_t rank, const std::string& log_file)
    : rank_(rank) {
  if (log_file.empty()) return;
  refuse_irregular(log_file);
  log_ = Fd(
      open(log_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  TS_CHECK_IO(log_.open(), "launch: cannot open the log of rank ", rank, ", ",
              log_file, ": ", std::strerror(errno), ".");
}

bool RankOutput::drain(int pipe) {
  // What comes meanwhile waits for the next call: a rank may write faster than
  // its lines are shown. What a rank that ended has left is there already.
  int there = 0;
  ioctl(pipe, FIONREAD, &there);
  char bytes[16384];
  for (ssize_t done = 0;;) {
    const ssize_t n = read(pipe, bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN;
    if (n == 0) return false;
    if (log_.open()) write_all(log_.get(), std::string(bytes, n));
    for (ssize_t i = 0; i < n; ++i) {
      pending_ += bytes[i];
      if (bytes[i] == '\n' || bytes[i] == '\r' ||
          pending_.size() >= kLongestLine) {
        show(std::exchange(pending_, {}));
      }
    }
    done += n;
    if (done >= there) return true;
  }
}

void RankOutput::flush() {
  if (!pending_.empty()) show(std::exchange(pending_, {}) + "\n");
}

void RankOutput::show(std::string line) {
  const bool marked = rank_ == 0 || names_its_rank(line, rank_);
  show_on_screen(marked ? line : c10::str("[rank ", rank_, "] ", line));
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) {
    line.pop_back();
  }
  if (line.empty()) return;
  last_lines_.push_back(std::move(line));
  if (last_lines_.size() > kLastLines) last_lines_.pop_front();
}

}  // namespace tessera::launch::detail
