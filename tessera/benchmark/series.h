// What is measured beside what: a backend, with the algorithm that runs over
// its messages and the memory that buffers lie in.
#pragma once

#include <optional>
#include <string>

#include "tessera/benchmark/operation.h"
#include "tessera/comm/verb.h"

namespace tessera::benchmark {

struct Series {
  std::string backend = "shm";
  std::string algorithm = "auto";  // as comm.algorithm has it

  bool registered = false;  // buffers of Communicator::empty

  std::string name() const;  // "gloo", "gloo:ring", "shm+registered"
  // False where the algorithm has no such operation: the backend's own would
  // run, under another name.
  bool serves(Operation operation) const;
};

// The verb that algorithms have it under; nothing: they never have it.
std::optional<comm::Verb> verb_of(Operation operation);

}  // namespace tessera::benchmark
