#include "cli/unreadable_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <climits>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "cli/sanitizers.h"
#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

// Of /proc/self/maps: "BEGIN-END rwxp OFFSET MAJOR:MINOR INODE   PATH".
struct Mapping {
  uintptr_t begin = 0, end = 0;
  uint64_t offset = 0;
  char* path = nullptr;  // in the line; none: of no file
};

// Here and below what a handler may call alone.
Mapping mapping_of(char* line) {
  Mapping of;
  char* at = line;
  of.begin = std::strtoull(at, &at, 16);
  if (*at++ != '-') return of;
  of.end = std::strtoull(at, &at, 16);
  const char* const rights = std::strchr(++at, ' ');
  if (rights != nullptr) of.offset = std::strtoull(rights, nullptr, 16);
  of.path = std::strchr(at, '/');
  return of;
}

class Lines {
 public:
  Lines() : fd_(::open("/proc/self/maps", O_RDONLY | O_CLOEXEC)) {}
  // The next one, until another is asked for; nullptr: there is none.
  char* next() {
    size_t length = 0;
    while (length + 1 < line_.size()) {
      if (at_ == end_) {
        const ssize_t got = ::read(fd_, read_.data(), read_.size());
        if (got <= 0) return nullptr;
        at_ = 0;
        end_ = static_cast<size_t>(got);
      }
      const char letter = read_[at_++];
      if (letter == '\n') break;
      line_[length++] = letter;
    }
    line_[length] = '\0';
    return line_.data();
  }

 private:
  const int fd_;
  std::array<char, 4096> read_{};
  std::array<char, PATH_MAX + 128> line_{};
  size_t at_ = 0, end_ = 0;
};

void say(const char* words) {
  [[maybe_unused]] const auto told =
      ::write(STDERR_FILENO, words, std::strlen(words));
}

// A terminal obeys what is in a name.
void say_name(char* name) {
  for (char* at = name; *at != '\0'; ++at) {
    const auto byte = static_cast<unsigned char>(*at);
    if (byte < 0x20 || byte == 0x7f) *at = '?';
  }
  say(name);
}

void say_number(uint64_t number) {
  std::array<char, 24> digits{};
  std::to_chars(digits.data(), digits.data() + digits.size() - 1, number);
  say(digits.data());
}

void tell_of(int signal, siginfo_t* info, void* /*context*/) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  Lines lines;
  // Another signal of this number was sent, or is of memory that failed.
  while (char* line = info->si_code == BUS_ADRERR ? lines.next() : nullptr) {
    const Mapping of = mapping_of(line);
    if (address < of.begin || address >= of.end) continue;
    if (of.path == nullptr) break;
    say("tessera: error: ");
    say_name(of.path);
    say(": byte ");
    say_number(address - of.begin + of.offset);
    say(" cannot be had: the file became shorter, its file system is full, or "
        "its disk failed.\n");
    ::_exit(static_cast<int>(ExitCode::kInputOutput));
  }
  std::signal(signal, SIG_DFL);
  ::raise(signal);
}

}  // namespace

void name_unreadable_files() {
  if (TS_SANITIZED) return;  // it has a handler of its own
  struct sigaction action{};
  action.sa_sigaction = &tell_of;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, nullptr);
}

}  // namespace tessera::cli
