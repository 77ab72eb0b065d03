// What several ranks hold alike, compared by hashes of every byte.
//
// Ranks that hold the same box of a weight, or of an optimizer's state, compute
// it each by itself from the same numbers: a byte that differs was changed by
// faulty memory, a faulty processor, or by a fault of the program, and no later
// step mends it. A checkpoint is written by one of them: what was compared just
// before is what all agreed on.
// Ranks of other processors round otherwise, and drift apart by the last bits:
// there nothing is compared, which is said once.
// Comm:   collective over `world`: one all_reduce of two numbers. Only where
//         something differs the hashes of all tensors go to rank 0.
// Cost:   a hash of what this rank holds and others do too (core/hash.h).
// Errors: TS_CHECK on every rank, with the ranks that differ and in what.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/group.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::train {

// The same for the same bytes on devices of one kind.
uint64_t hash_of_bytes(const at::Tensor& tensor);

// "" where all ranks compute `with` the same, else which one does not; the same
// on every rank. Collective.
std::string computing_otherwise(comm::Group& world, const std::string& with);
std::string processor_of(at::Device device);

// "rank 3 (tp=1)"; of many the first ones.
std::string named_ranks(const std::vector<int64_t>& ranks,
                        const mesh::DeviceMesh& mesh);

// "" where all holders agree, else who differs in what; the same on every rank.
std::string differing_replicas(const checkpoint::State& state,
                               const mesh::DeviceMesh& mesh,
                               comm::Group& world);

class ReplicaWatch {
 public:
  // Compares every so many steps; 0: never.
  ReplicaWatch(int64_t every, comm::Group& world, at::Device device);
  bool is_due(int64_t step) const { return every_ > 0 && step % every_ == 0; }
  // The state behind this step, which is taken where it is compared: once a
  // step. True: it was.
  bool compare(int64_t step, const std::function<checkpoint::State()>& take,
               const mesh::DeviceMesh& mesh);

 private:
  int64_t every_ = 0;
  int64_t compared_ = -1;  // the last step
  comm::Group& world_;
};

}  // namespace tessera::train
