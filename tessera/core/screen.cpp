#include "tessera/core/screen.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <string>

namespace tessera {
namespace {

constexpr size_t kMostKept = size_t{1} << 20;
constexpr std::chrono::milliseconds kAtTheEnd{500};

class Screen {
 public:
  void show(std::string_view text) {
    const std::lock_guard lock(mutex_);
    if (kept_.size() + text.size() > kMostKept) {
      left_out_ += text.size();
    } else {
      say_what_was_left_out();
      kept_ += text;
    }
    write_kept({});
  }

  bool show_kept(std::chrono::milliseconds patience) {
    const std::lock_guard lock(mutex_);
    write_kept(patience);
    if (kept_.empty()) say_what_was_left_out();
    write_kept(patience);
    return kept_.empty();
  }

 private:
  void say_what_was_left_out() {
    if (left_out_ == 0) return;
    kept_ += "tessera: " + std::to_string(left_out_) +
             " bytes were left out here: nobody read stderr\n";
    left_out_ = 0;
  }

  void write_kept(std::chrono::milliseconds patience) {
    size_t done = 0;
    while (done < kept_.size()) {
      pollfd ready{STDERR_FILENO, POLLOUT, 0};
      const int found = ::poll(&ready, 1, static_cast<int>(patience.count()));
      if (found == 0 || (found < 0 && errno != EINTR)) break;
      if (found < 0) continue;
      // So much fits where poll() says that something does; a terminal tells
      // that of less.
      static const size_t piece = ::isatty(STDERR_FILENO) ? 256 : 4096;
      const ssize_t written = ::write(STDERR_FILENO, kept_.data() + done,
                                      std::min(piece, kept_.size() - done));
      if (written >= 0) {
        done += static_cast<size_t>(written);
      } else if (errno != EINTR && errno != EAGAIN) {
        done = kept_.size();  // its reader is gone
      }
    }
    kept_.erase(0, done);
  }

  std::mutex mutex_;
  std::string kept_;
  size_t left_out_ = 0;  // bytes
};

Screen& screen() {
  static auto* screen = [] {
    auto* made = new Screen;  // outlives every static that may show something
    std::atexit([] { tessera::show_kept(kAtTheEnd); });
    return made;
  }();
  return *screen;
}

}  // namespace

void show_on_screen(std::string_view text) { screen().show(text); }

bool show_kept(std::chrono::milliseconds patience) {
  return screen().show_kept(patience);
}

}  // namespace tessera
