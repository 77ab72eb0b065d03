// verify_driver RUN.json: what `tessera verify` finds, in a build with faults
// that TESSERA_MUTANT switches on. Exit code 1 where it finds a difference, or
// where a proof of the programs, or of what is awaited, ends the run.
#include <iostream>

#include "tessera/core/error.h"
#include "tessera/engine/run_config.h"
#include "tessera/verify/verify.h"

int main(int argc, char** argv) {
  using namespace tessera;
  if (argc != 2) return 2;
  auto config = engine::read_run_config(argv[1]);
  config.data.train = {"random tokens"};
  const int64_t world = engine::implied_world_size(config);
  engine::complete(config, world);
  try {
    const auto found = verify::verify(config, world);
    for (const auto& difference : found.differences) {
      std::cout << difference.describe() << "\n";
    }
    return found.equal() ? 0 : 1;
  } catch (const std::exception& error) {
    std::cout << message_of(error) << "\n";
    return 1;
  }
}
