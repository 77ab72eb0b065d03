#include "tessera/program/checker.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace tessera::program {
namespace {

class Checker {
 public:
  explicit Checker(const Units& units)
      : units_(units),
        whole_(units.chunks.empty()),
        num_units_(static_cast<int64_t>(units.reads.size())),
        owners_(units.owners()),
        backwards_(num_units_, 0),
        reductions_(num_units_, 0) {
    for (int64_t stage : units.zero_stages) gathered_.push_back(stage < 3);
  }

  Proof run(const Program& program) {
    for (const auto& instruction : program) take(instruction);
    now_ = "the end";
    require(stepped_, "the program has no OptimizerStep");
    for (int64_t owner : owners_) {
      require(gathered_[owner] == (stage_of(owner) < 3), "the parameters of ",
              "unit ", owner,
              gathered_[owner] ? " stay gathered" : " are stale");
    }
    proof_.num_microbatches = num_microbatches();
    return proof_;
  }

 private:
  int64_t stage_of(int64_t owner) const { return units_.zero_stages[owner]; }

  // Of a micro-batch in a chunk.
  struct State {
    bool inputs = false, targets = false, received = false;
    bool sent_forward = false, sent_backward = false;
    int64_t forward = 0, backward = 0;  // units that went
  };

  template <typename... Args>
  void require(bool holds, const Args&... rule) const {
    TORCH_INTERNAL_ASSERT(holds, "program: at ", now_, ": ", c10::str(rule...));
  }

  void take(const Instruction& instruction) {
    now_ = describe(instruction);
    require(!stepped_ || instruction.op == Op::kGatherParameters,
            "only parameters are gathered behind the OptimizerStep");
    switch (instruction.op) {
      case Op::kZeroGradients:
        require(!zeroed_ && states_.empty(),
                "gradients are zeroed once, first");
        zeroed_ = true;
        break;
      case Op::kAwaitGradients:
        check_complete();
        awaited_ = true;
        break;
      case Op::kClipNorm:
        require(awaited_ && !clipped_,
                "clipping needs complete gradients, once");
        clipped_ = true;
        break;
      case Op::kOptimizerStep:
        require(awaited_, "the optimizer needs complete gradients");
        stepped_ = true;
        // Every rank updates its shard of what lives whole.
        for (int64_t owner : owners_) {
          const int64_t stage = stage_of(owner);
          if (stage == 1 || stage == 2) gathered_[owner] = false;
        }
        break;
      case Op::kGatherParameters:
        set_gathered(unit_of(instruction), true);
        ++proof_.gathers;
        break;
      case Op::kFreeParameters:
        require(stage_of(unit_of(instruction)) == 3,
                "only stage 3 frees parameters");
        set_gathered(unit_of(instruction), false);
        break;
      case Op::kReduceGradients:
        reduce(unit_of(instruction));
        break;
      default:
        take_microbatch(instruction);
    }
  }

  int64_t unit_of(const Instruction& instruction) const {
    require(!whole_ && instruction.unit >= 0 && instruction.unit < num_units_,
            "there is no such unit");
    return instruction.unit;
  }

  int64_t num_microbatches() const {
    std::set<int64_t> distinct;
    for (const auto& [key, state] : states_) distinct.insert(key.first);
    return static_cast<int64_t>(distinct.size());
  }

  // Units of a chunk: one where the program names whole chunks.
  int64_t length_of(int64_t chunk) const {
    if (whole_) return 1;
    require(chunk >= 0 && chunk < static_cast<int64_t>(units_.chunks.size()),
            "there is no chunk ", chunk);
    return static_cast<int64_t>(units_.chunks[chunk].size());
  }

  void set_gathered(int64_t unit, bool gathered) {
    require(gathered_[unit] != gathered,
            gathered ? "gathered already" : "not gathered");
    gathered_[unit] = gathered;
    proof_.peak_gathered = std::max<int64_t>(
        proof_.peak_gathered,
        std::ranges::count_if(owners_,
                              [&](int64_t owner) { return gathered_[owner]; }));
  }

  // The least that a unit which adds to these gradients went backward.
  int64_t backwards_of(int64_t owner) const {
    int64_t least = num_microbatches();
    for (int64_t reader : units_.readers_of(owner)) {
      least = std::min(least, backwards_[reader]);
    }
    return least;
  }

  void reduce(int64_t owner) {
    require(!awaited_, "behind the wait for gradients");
    ++reductions_[owner];
    if (stage_of(owner) >= 2) {
      require(backwards_of(owner) >= reductions_[owner],
              "a backward that adds to these gradients is still to come");
    } else {
      require(reductions_[owner] == 1, "reduced twice");
      reduced_after_[owner] = backwards_of(owner);
    }
  }

  void check_complete() {
    require(!awaited_, "gradients are awaited once");
    require(!states_.empty(), "there is no micro-batch");
    for (const auto& [key, state] : states_) {
      const auto [m, chunk] = key;
      require(state.backward == length_of(chunk), "micro-batch ", m,
              " never goes backward");
      require(state.sent_forward == state.received, "micro-batch ", m,
              state.received ? " was not sent on" : " hears of no gradient");
    }
    if (whole_) return;
    const int64_t count = num_microbatches();
    for (int64_t owner : owners_) {
      const bool each_time = stage_of(owner) >= 2;
      const int64_t due = each_time ? count : 1;
      require(reductions_[owner] == due, "the gradients of unit ", owner,
              " are reduced ", reductions_[owner], " times, not ", due);
      require(each_time || reduced_after_[owner] == count,
              "the gradients of unit ", owner, " were reduced after ",
              reduced_after_[owner], " of ", count, " micro-batches");
    }
  }

  void take_microbatch(const Instruction& instruction) {
    require(instruction.microbatch >= 0, "it names no micro-batch");
    require(zeroed_, "gradients are not zeroed yet");
    require(!awaited_, "a micro-batch behind the wait for gradients");
    State& state = states_[{instruction.microbatch, instruction.chunk}];
    const int64_t length = length_of(instruction.chunk);
    switch (instruction.op) {
      case Op::kLoadInputs:
      case Op::kReceiveActivations:
        require(!state.inputs, "its inputs are there already");
        state.inputs = true;
        break;
      case Op::kLoadTargets:
      case Op::kReceiveGradients:
        require(!state.targets, "its targets or gradients are there already");
        state.targets = true;
        state.received = instruction.op == Op::kReceiveGradients;
        break;
      case Op::kSendActivations:
        require(state.forward == length && !state.sent_forward,
                "sent once, behind its forward");
        state.sent_forward = true;
        break;
      case Op::kSendGradients:
        require(state.backward == length && !state.sent_backward,
                "sent once, behind its backward");
        state.sent_backward = true;
        break;
      default:
        compute(instruction, state, length);
    }
  }

  void compute(const Instruction& instruction, State& state, int64_t length) {
    const bool is_forward = instruction.op == Op::kForward;
    const int64_t place =
        is_forward ? state.forward : length - 1 - state.backward;
    require(place >= 0 && place < length, "it went already");
    if (!whole_) {
      const int64_t unit = unit_of(instruction);
      require(unit == units_.chunks[instruction.chunk][place],
              "not this unit's turn");
      for (int64_t owner : units_.reads[unit]) {
        require(gathered_[owner], "the parameters of unit ", owner,
                " are not gathered");
      }
      if (!is_forward) ++backwards_[unit];
    }
    if (is_forward) {
      require(state.inputs, "forward: behind its inputs");
      if (state.forward++ == 0) {
        proof_.peak_alive = std::max(proof_.peak_alive, ++alive_);
      }
      return;
    }
    require(state.forward == length && state.targets,
            "backward: behind its forward and its targets or gradients");
    if (++state.backward == length) --alive_;
  }

  const Units& units_;
  const bool whole_;
  const int64_t num_units_;
  const std::vector<int64_t> owners_;
  std::map<std::pair<int64_t, int64_t>, State> states_;  // micro-batch, chunk
  std::string now_ = "the end";
  std::vector<bool> gathered_;                // by unit, as are those below
  std::vector<int64_t> backwards_;            // micro-batches that went
  std::vector<int64_t> reductions_;           // begun
  std::map<int64_t, int64_t> reduced_after_;  // micro-batches
  bool zeroed_ = false, awaited_ = false, clipped_ = false, stepped_ = false;
  int64_t alive_ = 0;
  Proof proof_;
};

// One message as its receiver names it.
struct Message {
  int64_t from, to;  // stages
  bool activations;
  int64_t microbatch, chunk;  // the receiver's chunk
  auto operator<=>(const Message&) const = default;
};

class Network {
 public:
  explicit Network(const std::vector<Program>& programs)
      : programs_(programs),
        size_(static_cast<int64_t>(programs.size())),
        next_(programs.size(), 0) {}

  void run() {
    for (int64_t stage = 0; stage < size_; ++stage) post(stage);
    for (bool moved = true; moved;) {
      moved = false;
      for (int64_t stage = 0; stage < size_; ++stage) {
        if (pending_[stage].empty() || !all_met(stage)) continue;
        pending_[stage].clear();
        post(stage);
        moved = true;
      }
    }
    for (int64_t stage = 0; stage < size_; ++stage) {
      TORCH_INTERNAL_ASSERT(pending_[stage].empty(), "program: stage ", stage,
                            " waits for ever at ",
                            describe(programs_[stage][next_[stage] - 1]));
    }
    for (const auto& [channel, order] : sent_) {
      TORCH_INTERNAL_ASSERT(order == received_[channel], "program: stage ",
                            std::get<1>(channel),
                            " receives in another order than stage ",
                            std::get<0>(channel), " sends");
    }
  }

 private:
  // Runs on to the next messages, and posts all that follow one another.
  void post(int64_t stage) {
    const Program& program = programs_[stage];
    size_t& next = next_[stage];
    while (next < program.size() && !is_message(program[next].op)) ++next;
    while (next < program.size() && is_message(program[next].op)) {
      const auto [message, sends] = message_of(stage, program[next++]);
      (sends ? posted_sends_ : posted_receives_).insert(message);
      pending_[stage].emplace_back(message, sends);
      auto& order =
          (sends ? sent_
                 : received_)[{message.from, message.to, message.activations}];
      order.emplace_back(message.microbatch, message.chunk);
    }
  }

  bool all_met(int64_t stage) const {
    return std::ranges::all_of(pending_.at(stage), [&](const auto& each) {
      return (each.second ? posted_receives_ : posted_sends_)
          .contains(each.first);
    });
  }

  std::pair<Message, bool> message_of(int64_t stage,
                                      const Instruction& of) const {
    const Ends ends = ends_of(of, stage, size_);
    return {{ends.sender % size_, ends.receiver % size_, ends.activations,
             of.microbatch, ends.receiver / size_},
            ends.sends};
  }

  using Channel = std::tuple<int64_t, int64_t, bool>;
  using Order = std::vector<std::pair<int64_t, int64_t>>;
  const std::vector<Program>& programs_;
  const int64_t size_;
  std::vector<size_t> next_;
  std::map<int64_t, std::vector<std::pair<Message, bool>>> pending_;
  std::set<Message> posted_sends_, posted_receives_;
  std::map<Channel, Order> sent_, received_;
};

}  // namespace

Proof check(const Program& program, const Units& units) {
  return Checker(units).run(program);
}

void check_messages(const std::vector<Program>& stages) {
  Network(stages).run();
}

}  // namespace tessera::program
