// What the units of a model cost on one rank: facts of a model, a mesh, a place
// on it and a batch, which somebody who knows the model works out (models/trace
// of a decoder) and the checker, the simulator and the planner read.
//
// Units:  bytes and floating-point operations of one micro-batch on one rank.
// Memory: of a unit's life. Alive at the end of its forward are input, output
//         and kept; at the end of its backward the input's gradient, which is
//         as large as the input, in their place. A peak is the most that is
//         alive inside, beyond what was alive when it began: of forward the
//         input; of backward input, kept, output and the output's gradient,
//         all of which but kept their holders keep until its end. Parameters,
//         their gradients, what is shared by all units and a batch's token ids
//         are apart.
// Order:  collectives are in the order in which the unit calls them.
// No tensor, no group, no process.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/axis.h"

namespace tessera::program {

// Attention counts every pair of a query and a key that its kernel is given,
// masked or not, but of a window that is no mask those in it; its backward is
// five products where its forward is two, and four where scores are kept.
struct Flops {
  int64_t matmul = 0;
  int64_t attention = 0;
  int64_t total() const { return matmul + attention; }
  bool operator==(const Flops&) const = default;
};

// A product of matrices in a unit's forward: y (rows, out) = x (rows, in) W^T,
// with what its backward has of dx = dy W and dW = dy^T x.
struct MatrixProduct {
  int64_t rows = 0, in = 0, out = 0;
  bool input_gradient = true, weight_gradient = true;
  // Micro-batches whose dW is one product (nn/waiting_rows.h).
  int64_t together = 1;
  auto operator<=>(const MatrixProduct&) const = default;
};

// A call on a group inside a unit.
struct InnerCollective {
  std::string verb;              // as comm::VerbStats has it
  std::vector<mesh::Axis> axes;  // along which the ranks of the group differ
  int64_t bytes = 0;             // as comm::VerbStats counts them
  bool operator==(const InnerCollective&) const = default;
};

// Parameters of a unit that are gathered, reduced and freed together. Bytes
// with the gaps of the buffers that they lie in.
struct ParameterFacts {
  mesh::Axis data_axis = mesh::Axis::kDpShard;  // along which ZeRO cuts
  int64_t zero_stage = 0;                       // as of its unit
  std::vector<mesh::Axis> sum_axes;  // over which gradients are summed besides
  bool tied = false;                 // units of the last stage read them too
  int64_t elements = 0;              // as the unit reads them on this rank
  int64_t shard_elements = 0;        // that this rank updates
  // Between steps, on this rank.
  int64_t parameter_bytes = 0, gradient_bytes = 0, optimizer_bytes = 0;
  // As the unit computes with them, wherever they lie. Of the shard that this
  // rank updates, of what is trained: its gradient, and all that an update
  // reads and writes.
  int64_t read_bytes = 0, shard_gradient_bytes = 0, updated_bytes = 0;
  // Of stage 3, while they are gathered; and of stages 2 and 3, from the
  // backward's beginning until they are reduced.
  int64_t gathered_bytes = 0, whole_gradient_bytes = 0;
  // What groups count (comm::VerbStats) of an all_gather and a reduce_scatter
  // along data_axis, and of the all_reduce over sum_axes; what the first two
  // take meanwhile, and what gradients are packed into, before they need not be
  // whole any more.
  int64_t gather_message_bytes = 0, reduce_message_bytes = 0;
  int64_t sum_message_bytes = 0;
  int64_t gather_work_bytes = 0, reduce_work_bytes = 0, pack_bytes = 0;
  // Of matrices that are updated whole: this rank's pieces of updates, and what
  // is gathered of them, until the update; and the most that is alive inside
  // while a piece is made, and while the unit is updated.
  int64_t update_piece_bytes = 0, update_gathered_bytes = 0;
  int64_t piece_work_bytes = 0, update_work_bytes = 0;
  int64_t update_flops = 0;  // of each rank that has a piece

  int64_t state_bytes() const {
    return parameter_bytes + gradient_bytes + optimizer_bytes;
  }
};

// What is computed again of a unit before its backward: its forward, or only
// attention's core, whose activations are then not among those that are kept.
struct AgainFacts {
  Flops flops;
  std::vector<InnerCollective> collectives;
  int64_t kept_bytes =
      0;  // more than the forward kept, until the backward ends
  int64_t peak_bytes = 0;
};

struct UnitFacts {
  std::vector<ParameterFacts> parameters;  // that it owns
  std::vector<int64_t> reads;              // owners, itself first
  Flops forward, backward_input, backward_weight;
  std::vector<MatrixProduct> products;  // without attention's
  int64_t input_bytes = 0, output_bytes = 0, kept_bytes = 0;
  int64_t forward_peak_bytes = 0, backward_peak_bytes = 0;
  // Of a backward in two parts: the most inside of each, counted as above and
  // beyond what is alive when the second begins, and what the first leaves to
  // the second beside the input's gradient (nn/weight_queue.h).
  int64_t input_part_peak_bytes = 0, weight_part_peak_bytes = 0;
  int64_t put_off_bytes = 0;
  // Rows of a step's micro-batches that wait for each other, from its first
  // backward to its last (nn/waiting_rows.h).
  int64_t waiting_bytes = 0;
  // The most inside of that first backward (of the loss, of its forward, which
  // is both), or of its second part: with what comes to wait there.
  int64_t first_backward_peak_bytes = 0, first_weight_part_peak_bytes = 0;
  // Of a forward that records no graph: evaluation, and before recomputation.
  int64_t plain_forward_peak_bytes = 0;
  std::vector<InnerCollective> forward_collectives, backward_collectives;
  AgainFacts again;

  int64_t state_bytes() const {
    int64_t sum = 0;
    for (const auto& each : parameters) sum += each.state_bytes();
    return sum;
  }
};

struct Facts {
  // By owner: those that run, in order, then those that own parameters alone.
  std::vector<UnitFacts> units;
  // The head and the cross-entropy, behind the last unit, whose parameters it
  // reads: forward and backward are one, and its input becomes its gradient.
  UnitFacts loss;
  // For as long as the model lives, of all units: tables.
  int64_t shared_bytes = 0;
  // Micro-batches of a step that go through each unit.
  int64_t batches = 1;
  // Inputs and targets of a micro-batch, from their load to the step's end.
  int64_t batch_bytes = 0;
  // Those of all ranks of cp, of which a rank takes its part: while it loads.
  int64_t whole_batch_bytes = 0;
  // Of all micro-batches of a step, where one rank of several reads them: of
  // this one, which is held, and once more of the next one on its way.
  int64_t shared_batch_bytes = 0;
};

// Whether a rank holds these parameters of a unit that it reads: of one that
// another stage runs the tied ones alone.
bool holds(const UnitFacts& unit, const ParameterFacts& of, bool runs_here);
// The parameters of a rank that runs these units.
std::vector<ParameterFacts> held_by(const Facts& facts,
                                    const std::vector<int64_t>& units);

}  // namespace tessera::program
