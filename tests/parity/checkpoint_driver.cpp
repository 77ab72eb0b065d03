// What tests/parity/test_checkpoint.py drives.
//
//   checkpoint_driver save FOLDER RANKS SEED
//       a checkpoint of step 7, saved by so many ranks, cut by the seed
//   checkpoint_driver judge
//       of each safetensors file named on standard input, a line: "taken", or
//       why it is refused
#include <iostream>
#include <string>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/detail/test_state.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"

namespace {

using namespace tessera;

constexpr int64_t kStep = 7;

void save_checkpoint(const std::string& folder, int64_t ranks, uint64_t seed) {
  comm::run_threads(ranks, "shm", [&](comm::Communicator& all) {
    const auto state =
        checkpoint::detail::test_state(kStep, seed, all.rank(), ranks);
    checkpoint::save(folder, kStep, state, all.world());
  });
}

void judge_files() {
  std::string path;
  while (std::getline(std::cin, path)) {
    try {
      const checkpoint::SafetensorsFile file(path);
      for (const auto& entry : file.tensors()) file.tensor(entry.name).clone();
      std::cout << "taken\n";
    } catch (const Error& error) {
      std::cout << error.what_without_backtrace() << "\n";
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string verb = argc > 1 ? argv[1] : "";
  if (verb == "save" && argc == 5) {
    save_checkpoint(argv[2], std::stoll(argv[3]), std::stoull(argv[4]));
  } else if (verb == "judge" && argc == 2) {
    judge_files();
  } else {
    return 2;
  }
  return 0;
}
