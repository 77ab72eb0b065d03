#include "tessera/program/checker.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

namespace tessera::program {
namespace {

class Checker {
 public:
  Proof run(const Program& program) {
    for (const auto& instruction : program) take(instruction);
    require(stepped_, "the program has no OptimizerStep");
    for (const auto& [m, state] : states_) {
      require(state.backward, "micro-batch ", m, " never goes backward");
    }
    proof_.num_microbatches = static_cast<int64_t>(states_.size());
    return proof_;
  }

 private:
  struct State {
    bool inputs = false, targets = false, forward = false, backward = false;
  };

  template <typename... Args>
  void require(bool holds, const Args&... rule) const {
    TORCH_INTERNAL_ASSERT(holds, "program: at ", now_, ": ", c10::str(rule...));
  }

  void take(const Instruction& instruction) {
    now_ = describe(instruction);
    require(!stepped_, "nothing may follow the OptimizerStep");
    switch (instruction.op) {
      case Op::kZeroGradients:
        require(!zeroed_ && states_.empty(),
                "gradients are zeroed once, first");
        zeroed_ = true;
        break;
      case Op::kReduceGradients:
        require(last_backward_ && !reduced_,
                "it follows the one BackwardReduce");
        reduced_ = true;
        break;
      case Op::kClipNorm:
        require(reduced_ && !clipped_,
                "clipping needs reduced gradients, once");
        clipped_ = true;
        break;
      case Op::kOptimizerStep:
        require(reduced_, "the optimizer needs reduced gradients");
        stepped_ = true;
        break;
      default:
        take_microbatch(instruction);
    }
  }

  void take_microbatch(const Instruction& instruction) {
    require(instruction.microbatch >= 0, "it names no micro-batch");
    require(zeroed_, "gradients are not zeroed yet");
    require(!last_backward_, "a micro-batch after the BackwardReduce");
    State& state = states_[instruction.microbatch];
    switch (instruction.op) {
      case Op::kLoadInputs:
        require(!state.inputs, "loaded twice");
        state.inputs = true;
        break;
      case Op::kLoadTargets:
        require(!state.targets, "loaded twice");
        state.targets = true;
        break;
      case Op::kForward:
        require(state.inputs && !state.forward,
                "forward: once, after its inputs");
        state.forward = true;
        proof_.peak_alive = std::max(proof_.peak_alive, ++alive_);
        break;
      default:  // a backward
        require(state.forward && state.targets && !state.backward,
                "backward: once, after its forward and targets");
        state.backward = true;
        --alive_;
        last_backward_ = instruction.op == Op::kBackwardReduce;
    }
  }

  std::map<int64_t, State> states_;
  std::string now_ = "the end";
  bool zeroed_ = false, last_backward_ = false, reduced_ = false;
  bool clipped_ = false, stepped_ = false;
  int64_t alive_ = 0;
  Proof proof_;
};

}  // namespace

Proof check(const Program& program) { return Checker().run(program); }

}  // namespace tessera::program
