// Registered ("symmetric") memory: tensors that peers of this host can read and
// write where they lie, so that collectives need not stage them.
//
// Tensors are carved from few large memory files (memory_file.h), which this
// process keeps for tensors to come; a peer maps a file when it first meets it.
// Every group of the process serves all of it: there is nothing to register
// with a group.
// Units:  bytes. A tensor begins at a multiple of kAlignment.
// Errors: TS_CHECK where the host has no memory for it.
// Threads: any; PeerRegions one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "tessera/comm/shm/mapping.h"

namespace tessera::comm::shm {

inline constexpr size_t kAlignment = 4096;

// Where bytes lie, in words that another process understands.
struct Location {
  uint64_t region = 0;  // its nonce
  uint64_t region_bytes = 0;
  uint64_t offset = 0;
  int32_t fd = -1;  // of the owner
};

// A dense tensor, not initialised, in registered memory.
at::Tensor empty_registered(at::IntArrayRef sizes, at::ScalarType dtype);

// nullopt: not in registered memory.
std::optional<Location> locate(const void* data);

// The files of peers that this process has mapped.
class PeerRegions {
 public:
  // The address here of a place in the memory of process `pid`; `owner` names
  // it in errors.
  char* address_of(pid_t pid, const Location& location,
                   const std::string& owner);

 private:
  std::map<std::pair<pid_t, uint64_t>, std::unique_ptr<Mapping>> mapped_;
};

}  // namespace tessera::comm::shm
