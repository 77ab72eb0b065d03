#include "tessera/core/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/fd.h"
#include "tessera/core/files.h"
#include "tessera/core/printable.h"
#include "tessera/core/screen.h"

namespace tessera::log {
namespace {

struct RankFile {
  Fd fd;
  bool is_broken = false;  // within a line
};

struct State {
  std::mutex mutex;
  Level level = [] {
    const char* wanted = std::getenv("TESSERA_LOG");
    return wanted != nullptr && std::string(wanted) == "debug" ? Level::kDebug
                                                               : Level::kInfo;
  }();
  std::map<int, RankFile> files;  // by rank
};

State& state() {
  static auto* state = new State;  // outlives every static that may log
  return *state;
}

// A file is read weeks later, on another host.
constexpr const char* kOnScreen = "%H:%M:%S ";
constexpr const char* kInFile = "%Y-%m-%d %H:%M:%S%z ";

std::string time_now(const char* form) {
  std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, form, &parts);
  return text;
}

const char* mark(Level level) {
  switch (level) {
    case Level::kWarning:
      return "warning: ";
    case Level::kError:
      return "error: ";
    default:
      return "";
  }
}

// Behind the time.
std::string line_of(Level level, const std::string& message) {
  const RankContext& who = rank_context();
  const std::string prefix = who.world_size > 1 ? who.prefix() : "";
  return prefix + mark(level) + printable(message, /*keeps_lines=*/true) + "\n";
}

// REQUIRES: the lock is held.
void append(State& s, const std::string& line) {
  const auto found = s.files.find(rank_context().rank);
  if (found == s.files.end()) return;
  RankFile& file = found->second;
  // Behind a full disk the next line is tried again, on a line of its own.
  const std::string text =
      (file.is_broken ? "\n" : "") + time_now(kInFile) + line;
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t wrote =
        ::write(file.fd.get(), text.data() + done, text.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) break;
    done += static_cast<size_t>(wrote);
  }
  if (done > 0) file.is_broken = done < text.size();
}

}  // namespace

void note(const std::string& message) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  append(s, line_of(Level::kInfo, message));
}

void write(Level level, const std::string& message) {
  State& s = state();
  const RankContext& who = rank_context();
  const std::string line = line_of(level, message);
  std::lock_guard lock(s.mutex);
  if (level < s.level) return;
  append(s, line);
  if (who.rank <= 0 || level >= Level::kWarning) {
    show_on_screen(time_now(kOnScreen) + line);
  }
}

void open_rank_file(int rank, const std::string& path) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  refuse_irregular(path);
  Fd fd(::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
  TS_CHECK_IO(fd.open(), "log: cannot open ", path,
              " for appending: ", std::generic_category().message(errno), ".");
  s.files.insert_or_assign(rank, RankFile{std::move(fd)});
}

void close_rank_file(int rank) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.files.erase(rank);
}

}  // namespace tessera::log
