// Optimizers over named segments: whole parameters, or a rank's flat shards of
// them. An optimizer does not know which.
//
//   auto optimizer = optim::make_optimizer(config, std::move(segments));
//   optimizer->step(optim::lr_at(step, steps, config.lr, schedule));
//
// Precision: parameters in fp32 or fp64 are updated as they are. One in bf16 or
//          fp16 gets an fp32 master here, which is updated and copied back:
//          make the optimizer when the parameters hold their values. Moments
//          may be kept in a narrower type: they are widened for an update and
//          rounded behind it.
// Place:   a segment is updated where its states lie: on the host where these
//          do, whatever device its parameter or its gradient is on. The
//          gradient comes there, and so does a parameter without a master; what
//          is new goes back. Of directions that are made of whole matrices the
//          momentum alone is there, they themselves are where the gradient is.
// Average: of the masters over the steps, beginning with what they are before
//          the first: m <- ema m + (1 - ema) p behind each update.
// Clips:   by a factor that a step is given: a rule multiplies gradients by it
//          as it reads them, or where they lie: after it they are of no use.
// Comm:    none: gradients arrive reduced.
// Errors:  a gradient that is missing or of another shape is refused by name,
//          before anything is changed. Parameters (or masters) of two types or
//          on two devices are refused.
// Source:  of the average: torch.optim.swa_utils.get_ema_multi_avg_fn.
// Threads: an optimizer belongs to one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/optim/parameter_groups.h"
#include "tessera/optim/registry.h"

namespace tessera::optim {

struct FlatSegment {
  std::string name;      // the parameter's
  at::Tensor parameter;  // contiguous, or its parts along dim 0 are; or empty
  // Where the gradient lies. Undefined: in parameter.grad() at each step.
  at::Tensor gradient;
  bool decay = false;      // weight decay: for parameters of two or more dims
  bool is_matrix = false;  // hidden, as muon.h has them: one, or one an expert
  // Above 0: steps by it against the gradient's sign, at any learning rate.
  double sign_rate = 0;
};

// What the pieces of a matrix were put together to, and where a segment lies in
// it. Its memory is taken.
struct WholePiece {
  at::Tensor whole;
  std::vector<int64_t> offset;  // by dim
};

// Zeros for a state of a segment; they may lie anywhere on the CPU, of whatever
// device the segment is.
using StateMemory = std::function<at::Tensor(
    size_t segment, at::IntArrayRef sizes, at::ScalarType type)>;

struct NamedTensor {
  std::string name;        // "exp_avg.blocks.0.attention.q.weight"
  std::string parameter;   // whose layout it has; "": one number for all
  at::Tensor tensor;       // live: copying into it loads the state
  int gradient_power = 1;  // as a Moment's; 0: as large as the parameter
};

class Optimizer {
 public:
  // REQUIRES: a configuration that was checked, but for the rule's `betas`
  // where it has none.
  // `memory`: for all states but the step; null: LibTorch's.
  Optimizer(const UpdateRule& rule, const OptimizerConfig& config,
            std::vector<FlatSegment> segments,
            const StateMemory& memory = nullptr);
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // One update of every segment.
  void step(double lr);
  // The same in parts, to the bit: begin_step() once, then step() of ranges of
  // segments in any order, which together are all segments, each once.
  // Gradients count times `gradient_scale` in all of it.
  // So they do times `scale_there` (update_group.h). `paced`: with what
  // send_pace() has sent, in place of the step's number and lr. REQUIRES: both
  // only where updates read there.
  void begin_step(double gradient_scale = 1.0, at::Tensor scale_there = {},
                  bool paced = false);
  // Whether all updates heed numbers that are on their device.
  bool reads_there() const;
  // For a step that a device repeats as it has recorded it
  // (core/device_graph.h): what is not as in that one, of the next step; and
  // that it was taken. REQUIRES: reads_there().
  void send_pace(double lr);
  void count_repeated_step() { steps_.add_(1); }
  // A step that has begun, and has updated nothing on the device, is none.
  void take_back_step();
  void step(double lr, size_t first, size_t count);
  // Of a segment that is a piece of a matrix, whose rule needs it whole: what
  // is to be gathered, once begin_step() was called; then whole_of(i) gives the
  // whole of segment i to its step. Without it segments are whole themselves.
  bool needs_whole(size_t segment) const;
  at::Tensor piece(size_t segment);
  // Of one that is whole itself.
  WholePiece piece_as_whole(size_t segment);
  using WholeOf = std::function<WholePiece(size_t segment)>;
  void step(double lr, size_t first, size_t count, const WholeOf& whole_of);

  // Parameters and their averages change places, until they do so again.
  // REQUIRES: averages are kept, and a step was taken.
  void swap_averages();

  // Steps begun, over all runs: part of the state.
  int64_t steps() const;
  // Everything that a resumed run needs beside the parameters.
  const std::vector<NamedTensor>& state() const { return state_; }
  const std::vector<FlatSegment>& segments() const { return segments_; }

 private:
  // What an update reads and writes in place of what lies there, which is put
  // back behind it: first what lies there. Moments in the masters' type,
  // parameters on the host.
  using Widened = std::vector<std::pair<at::Tensor, at::Tensor>>;
  void add_ways();
  void make_states(size_t segment, const StateMemory& memory);
  void name_states();
  const UpdateWay& way(size_t segment) const { return ways_[way_of_[segment]]; }
  void require_gradient(size_t segment) const;
  // And its gradient lies elsewhere.
  bool is_updated_on_host(size_t segment) const;
  at::Tensor gradient_of(size_t segment, bool in_parts) const;
  void append_segment(size_t segment, UpdateGroup& group,
                      Widened& widened) const;
  double lr_of(size_t way, double lr) const;
  UpdateGroup group_of(size_t first, size_t count, size_t way,
                       Widened& widened) const;
  void update(double lr, size_t first, size_t count, size_t way);
  void update_matrix(double lr, size_t segment, const WholeOf& whole_of);

  const UpdateRule rule_;
  OptimizerConfig config_;
  std::vector<FlatSegment> segments_;
  std::vector<at::Tensor> masters_;  // or the parameter itself
  std::vector<UpdateWay> ways_;
  std::vector<OptimizerConfig> configs_;          // by way: with its betas
  std::vector<size_t> way_of_;                    // by segment
  std::vector<std::vector<at::Tensor>> moments_;  // by segment
  std::vector<at::Tensor> averages_;  // by segment, where they are kept
  bool swapped_ = false;
  std::vector<NamedTensor> state_;
  at::Tensor steps_;           // int64, on the CPU
  double gradient_scale_ = 1;  // of the step that has begun
  at::Tensor scale_there_;     // likewise
  bool is_paced_ = false;      // likewise
  at::Tensor paces_;           // by way, on the masters' device
  std::vector<bool> updated_;  // in this step, by segment
};

// The optimizer that config.type names.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                          std::vector<FlatSegment> segments,
                                          const StateMemory& memory = nullptr);

}  // namespace tessera::optim
