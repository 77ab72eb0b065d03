// What libraries read when they are loaded, for commands that compute and the
// processes that these start; unless the user, or who started this one, has set
// it. That must be there when they are loaded: the program starts itself again,
// before the libraries' initialisers, of which LibTorch's take 0.2 s.
//
// Threads of a rank spin while they wait for each other. Left to itself libgomp
// does so for milliseconds, and on a host that does anything else beside they
// take each other's core away: a step of some milliseconds was 1.7 to 3 times
// as long. So many turns cost nothing where the cores are free.
//
// Memory of large tensors is kept by the C library (core/kept_memory.h), on
// huge pages where the host gives them: no page fault after the first step.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "cli/sanitizers.h"
#include "tessera/core/kept_memory.h"

#if !TS_SANITIZED

namespace tessera::cli {
namespace {

bool computes(int argc, char** argv) {
  constexpr std::array kCommands = {"train", "eval", "generate", "bench",
                                    "launch"};
  return argc > 1 && std::ranges::find(kCommands, std::string_view(argv[1])) !=
                         kCommands.end();
}

// Neither the C library's environment nor streams are there yet.
void start_again(int argc, char** argv, char** environment) {
  if (!computes(argc, argv)) return;
  std::vector<char*> all;
  for (char** each = environment; *each != nullptr; ++each) {
    all.push_back(*each);
  }
  const auto has = [&](const std::string& name) {
    return std::ranges::any_of(all, [&](std::string_view each) {
      return each.starts_with(name + "=");
    });
  };
  if (has("TESSERA_LIBRARIES_SET_UP")) return;
  std::string spins = "GOMP_SPINCOUNT=10000";
  if (!has("GOMP_SPINCOUNT") && !has("OMP_WAIT_POLICY")) {
    all.push_back(spins.data());
  }
  std::string tunables =
      "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
      ":glibc.malloc.mmap_threshold=" +
      std::to_string(kKeptMemory.mmap_threshold) +
      ":glibc.malloc.trim_threshold=" +
      std::to_string(kKeptMemory.trim_threshold) +
      ":glibc.malloc.top_pad=" + std::to_string(kKeptMemory.top_pad);
  if (!has("GLIBC_TUNABLES")) all.push_back(tunables.data());
  std::string done = "TESSERA_LIBRARIES_SET_UP=1";
  all.push_back(done.data());
  all.push_back(nullptr);
  // Where it cannot, it goes on as it is.
  ::execve("/proc/self/exe", argv, all.data());
}

[[gnu::section(".preinit_array"),
  gnu::used]] void (*const kFirstOfAll)(int, char**, char**) = &start_again;

}  // namespace
}  // namespace tessera::cli

#endif
