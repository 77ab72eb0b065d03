// Where the parameters of a bundle lie on this rank: its shards, and the full
// parameters that layers compute with.
//
// In ZeRO stages 1 and 2 a shard is a view of the full parameter, whose other
// rows are stale until a gather; in 3 the full ones have memory only while they
// are gathered.
// Types:  full parameters may have another type than shards, which are then
//         apart in every stage: a gather rounds, and moves the rounded.
// Comm:   a gather is one all_gather over the shards' ranks, to where the full
//         parameter lies where its pieces lie so (Cut::lies_in_pieces()), else
//         with a copy. With P bytes and N ranks a rank sends (N-1)/N P.
// Memory: booked as parameters (core/memory_kind.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "tessera/comm/flat_buffer.h"
#include "tessera/comm/group.h"
#include "tessera/parallel/data/bundle.h"

namespace tessera::parallel::data {

// An alias that autograd does not know as one: writing to it is no change that
// a recorded graph would refuse.
at::Tensor window_of(const at::Tensor& tensor);
// Gives a tensor's storage other memory, of its own allocator and so of its
// device; what it held is lost.
void resize_storage(const at::Tensor& tensor, int64_t bytes);
// A tensor like this one that has its memory now; this one has none.
at::Tensor take_memory(const at::Tensor& tensor);

// Zeros for what stays between steps of one unit; null: a group's.
using KeptMemory =
    std::function<at::Tensor(at::IntArrayRef sizes, at::ScalarType type)>;

class ParameterStorage {
 public:
  // Takes over the memory of the parameters; of those that are cut it makes new
  // memory. `full`: the type of the full ones; none: their own.
  ParameterStorage(const Bundle& bundle, comm::Group& shards,
                   std::optional<at::ScalarType> full = {},
                   const KeptMemory& memory = nullptr);

  // This rank's boxes, in the order of the bundle.
  const std::vector<at::Tensor>& shards() const { return local_; }

  void begin_gather(comm::Mode mode);
  void await_gather();
  // Full parameters in the shards' type: those that a gather filled, or new
  // ones where that rounds. Comm: then an all_gather.
  std::vector<at::Tensor> full_masters();
  // Shards from such ones, which somebody wrote to.
  void take(const std::vector<at::Tensor>& full_masters);
  void free();

 private:
  void lay_out(const KeptMemory& memory);
  at::TensorOptions full_options() const;
  at::Tensor empty_full(size_t i, const KeptMemory& memory);
  at::Tensor kept(const KeptMemory& memory, at::IntArrayRef sizes,
                  at::ScalarType type);
  const Bundle& bundle_;
  comm::Group& group_;
  const at::ScalarType full_type_;
  const bool apart_;   // shards are no views of the full parameters
  const bool direct_;  // a gather goes to where the full parameter lies
  std::vector<at::Tensor> local_;  // shards
  std::vector<at::Tensor> whole_;  // where a gather writes
  at::Tensor piece_;               // all shards, where they are apart
  comm::FlatBuffer full_;          // of stage 3: all parameters
  at::Tensor all_pieces_;          // of direct_: what the full parameter begins
  int64_t full_bytes_ = 0;
  // Of the gather under way.
  at::Tensor sent_, pieces_;
  comm::Work work_;
};

}  // namespace tessera::parallel::data
