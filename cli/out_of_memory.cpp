#include "cli/out_of_memory.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <tuple>

#include "cli/sanitizers.h"
#include "tessera/core/error.h"
#include "tessera/core/fd.h"

namespace tessera::cli {
namespace {

std::atomic<bool> throws = false;

#if !TS_SANITIZED

using Words = std::array<char, 320>;

// Of address space. Allocates nothing, as all here.
size_t bytes_in_use() {
  std::array<char, 32> text{};
  const Fd file(::open("/proc/self/statm", O_RDONLY | O_CLOEXEC));
  if (!file.open()) return 0;
  const ssize_t read = ::read(file.get(), text.data(), text.size() - 1);
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return read > 0 ? std::strtoull(text.data(), nullptr, 10) * page : 0;
}

void write_words(size_t bytes, Words& words) {
  rlimit limit{};
  ::getrlimit(RLIMIT_AS, &limit);
  const bool is_limited = limit.rlim_cur != RLIM_INFINITY;
  const int end = std::snprintf(
      words.data(), words.size(),
      "out of memory: %zu bytes more were needed, beside %zu of address space "
      "that this process has; ",
      bytes, bytes_in_use());
  char* const rest = words.data() + end;
  const size_t room = words.size() - static_cast<size_t>(end);
  if (is_limited) {
    std::snprintf(rest, room,
                  "its limit is %zu (ulimit -v). Raise that, or leave it out.",
                  static_cast<size_t>(limit.rlim_cur));
  } else {
    std::snprintf(rest, room,
                  "the system gives no more. Use less beside it, or a smaller "
                  "batch or model.");
  }
}

class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) { write_words(bytes, words_); }
  const char* what() const noexcept override { return words_.data(); }

 private:
  Words words_{};
};

[[noreturn]] void fail(size_t bytes) {
  const OutOfMemory error(bytes);
  if (throws) throw error;
  std::array<char, sizeof(Words) + 32> line{};
  const int size = std::snprintf(line.data(), line.size(),
                                 "tessera: error: %s\n", error.what());
  std::ignore = ::write(STDERR_FILENO, line.data(), static_cast<size_t>(size));
  ::_exit(static_cast<int>(ExitCode::kFailed));
}

#endif

}  // namespace

void begin_to_throw_out_of_memory() { throws = true; }

}  // namespace tessera::cli

#if !TS_SANITIZED

// The other forms, arrays' and those that do not throw, call these.
void* operator new(size_t bytes) {
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) tessera::cli::fail(bytes);
  return memory;
}

void* operator new(size_t bytes, std::align_val_t alignment) {
  const auto unit = static_cast<size_t>(alignment);
  if (bytes > SIZE_MAX - unit) tessera::cli::fail(bytes);
  void* const memory =
      std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit);
  if (memory == nullptr) tessera::cli::fail(bytes);
  return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}

#endif
