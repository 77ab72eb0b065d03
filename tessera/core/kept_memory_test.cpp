#include "tessera/core/kept_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <memory>

namespace tessera {
namespace {

int64_t page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

TEST(KeptMemory, IsThereForTheNextBlock) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer gives memory in place of the C library";
#endif
  if (std::getenv("GLIBC_TUNABLES") != nullptr) {
    ::unsetenv("GLIBC_TUNABLES");
  }
  keep_freed_memory();
  constexpr size_t kBytes = size_t{48} << 20;  // above what is kept by itself
  const auto use = [] {
    const std::unique_ptr<volatile char[]> block(new volatile char[kBytes]);
    for (size_t i = 0; i < kBytes; i += 4096) block[i] = 1;
  };
  use();
  const int64_t before = page_faults();
  for (int i = 0; i < 8; ++i) use();
  EXPECT_LT(page_faults() - before, 100);  // else 12,000 each time
}

}  // namespace
}  // namespace tessera
