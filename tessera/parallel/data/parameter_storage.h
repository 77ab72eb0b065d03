// Where the parameters of a bundle lie on this rank: its shards, and the full
// parameters that layers compute with.
//
// In ZeRO stages 1 and 2 a shard is a view of the full parameter, whose other
// rows are stale until a gather; in 3 the full ones have memory only while they
// are gathered.
// With two versions there are two of all that: steps read one and updates write
// to the other, and whichever an update writes to is where shards() point. A
// version is counted from that of the step that runs; the last one is the
// newest, the one that is updated.
// Types:  full parameters may have another type than shards, which are then
//         apart in every stage: a gather rounds, and moves the rounded.
// Place:  in stage 3 full parameters may be a device's, whose shards lie on the
//         host: a gather sends this rank's there first. So does one by itself,
//         which has all of them (Bundle::in_files).
// Comm:   a gather is one all_gather over the shards' ranks, to where the full
//         parameter lies where its pieces lie so (Cut::lies_in_pieces()), else
//         with a copy. With P bytes and N ranks a rank sends (N-1)/N P.
// Memory: booked as parameters (core/memory_kind.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/comm/flat_buffer.h"
#include "tessera/comm/group.h"
#include "tessera/core/device.h"
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
// One that lies where this one does, until point() puts it elsewhere. REQUIRES:
// what it points to outlives that, and lies alike.
at::Tensor pointer_to(const at::Tensor& tensor);
void point(const at::Tensor& pointer, const at::Tensor& to);

// Zeros for what stays between steps of one unit; null: a group's.
using KeptMemory =
    std::function<at::Tensor(at::IntArrayRef sizes, at::ScalarType type)>;

class ParameterStorage {
 public:
  // Takes over the memory of the parameters; of those that are cut it makes new
  // memory. `full`: type and device of the full ones, where not their own.
  // What is frozen has one version, whatever `versions`. `sent`: of all of a
  // rank.
  ParameterStorage(const Bundle& bundle, comm::Group& shards, SentCopies& sent,
                   const at::TensorOptions& full = {},
                   const KeptMemory& memory = nullptr, int64_t versions = 1);

  // This rank's boxes, in the order of the bundle: those that are updated.
  const std::vector<at::Tensor>& shards() const { return local_; }
  // Of the step that runs, as layers read them. REQUIRES: two versions.
  const std::vector<at::Tensor>& own_of_step() const { return slot(0).own; }

  // Layers compute with this version from here on.
  void use(int64_t version);
  // The newest, for the next step: what is updated is a copy from here on, in
  // place of version 0.
  void keep();
  // Version 1 is 0 from here on.
  void next_version() { ++first_; }
  // All versions are as the newest is.
  void make_alike();

  void begin_gather(comm::Mode mode, int64_t version = 0);
  void await_gather(int64_t version = 0);
  // Full parameters in the shards' type: those that a gather filled, or new
  // ones where that rounds. Comm: then an all_gather.
  std::vector<at::Tensor> full_masters();
  // Shards from such ones, which somebody wrote to.
  void take(const std::vector<at::Tensor>& full_masters);
  void free(int64_t version = 0);

 private:
  // Where a version lies.
  struct Slot {
    std::vector<at::Tensor> own;    // this rank's boxes
    std::vector<at::Tensor> full;   // as layers read them
    std::vector<at::Tensor> whole;  // the same, where a gather writes
    at::Tensor piece;               // all of own, where they are apart
    comm::FlatBuffer flat;          // of stage 3: all of full
    at::Tensor all_pieces;  // of direct_: what the full parameter begins
  };
  const Slot& slot(int64_t version) const {
    return slots_[(first_ + version) % slots_.size()];
  }
  Slot& slot(int64_t version) {
    return slots_[(first_ + version) % slots_.size()];
  }
  int64_t newest() const { return static_cast<int64_t>(slots_.size()) - 1; }
  // `filled`: the values that parameters have.
  void lay_out_whole(Slot& slot, const std::vector<at::Tensor>& filled);
  void lay_out_cut(Slot& slot, const std::vector<at::Tensor>& filled,
                   const KeptMemory& memory);
  void free(Slot& slot);
  at::ScalarType full_type() const {
    return at::typeMetaToScalarType(full_options_.dtype());
  }
  at::Tensor empty_full(Slot& slot, size_t i, const KeptMemory& memory);
  at::Tensor kept(const KeptMemory& memory, at::IntArrayRef sizes,
                  at::ScalarType type);
  const Bundle& bundle_;
  comm::Group& group_;
  SentCopies& copies_;
  const at::TensorOptions full_options_;
  const bool apart_;         // shards are no views of the full parameters
  const bool direct_;        // a gather goes to where the full parameter lies
  std::vector<Slot> slots_;  // by version, from first_ on
  size_t first_ = 0;         // counted on
  std::vector<at::Tensor> local_;  // shards
  int64_t full_bytes_ = 0;
  // Of the gather under way.
  at::Tensor sent_, pieces_;
  comm::Work work_;
};

}  // namespace tessera::parallel::data
