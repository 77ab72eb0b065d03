#include <algorithm>
#include <set>

#include "tessera/program/detail/rules.h"

namespace tessera::program::detail {

int64_t MicrobatchRules::num_microbatches() const {
  std::set<int64_t> distinct;
  for (const auto& [key, state] : states_) distinct.insert(key.first);
  return static_cast<int64_t>(distinct.size());
}

// Units of a chunk: one where the program names whole chunks.
int64_t MicrobatchRules::length_of(int64_t chunk) const {
  if (!names_units()) return 1;
  require(chunk >= 0 && chunk < static_cast<int64_t>(units_.chunks.size()),
          "there is no chunk ", chunk);
  return static_cast<int64_t>(units_.chunks[chunk].size());
}

int64_t MicrobatchRules::unit_of(const Instruction& instruction,
                                 int64_t place) const {
  require(place >= 0 && place < length_of(instruction.chunk),
          "it went already");
  return names_units() ? units_.chunks[instruction.chunk][place] : -1;
}

void MicrobatchRules::take(const Instruction& instruction) {
  if (instruction.op == Op::kNorm) complete_.insert(instruction.version);
  if (instruction.op == Op::kShareBatch) {
    require(units_.shares_batch, "every rank reads for itself");
    return advance(instruction, next_batch_, "it was begun already");
  }
  const bool loads = instruction.op == Op::kLoadInputs ||
                     instruction.op == Op::kLoadTargets ||
                     instruction.op == Op::kLoadDocuments;
  if (!is_message(instruction.op) && !is_hand_over(instruction.op) &&
      !is_compute(instruction.op) && !loads && instruction.op != Op::kLoss) {
    return;
  }
  require(instruction.microbatch >= 0, "it names no micro-batch");
  // What was sent may still be on its way where a step goes on.
  const bool only_arrives = units_.versions.parameters > 1 &&
                            is_send(instruction.op) && !begins(instruction);
  require(only_arrives || !complete_.contains(instruction.version),
          "a micro-batch behind the norm");
  State& state = states_[{instruction.microbatch, instruction.chunk}];
  if (!state.version) state.version = instruction.version;
  require(*state.version == instruction.version, "its micro-batch began with ",
          "version ", *state.version, " of the parameters");
  switch (instruction.op) {
    case Op::kLoadInputs:
      require(state.inputs == Progress::kNone, "its inputs are there already");
      state.inputs = Progress::kDone;
      state.loaded = state.documents = true;
      break;
    case Op::kLoadDocuments:
      require(!state.documents && state.forward == 0,
              "where documents begin is said once, before its forward");
      state.documents = true;
      break;
    case Op::kLoadTargets:
      require(!state.targets, "its targets are there already");
      state.targets = true;
      break;
    case Op::kLoss:
      require(state.forward == length_of(instruction.chunk) && state.targets,
              "a loss is behind the forward and the targets");
      require(!names_units() ||
                  instruction.unit == units_.chunks[instruction.chunk].back(),
              "a loss is of the last unit");
      require(!state.loss, "its loss is there already");
      state.loss = true;
      break;
    case Op::kForward:
      forward(instruction, state);
      break;
    case Op::kHandActivations:
    case Op::kHandGradients:
      hand_over(instruction, state);
      break;
    default:
      is_message(instruction.op) ? message(instruction, state)
                                 : backward(instruction, state);
  }
}

// A send and its receive at once: to the next chunk, or the one before.
void MicrobatchRules::hand_over(const Instruction& instruction, State& state) {
  const bool up = instruction.op == Op::kHandActivations;
  require((up ? state.forward : state.input) == length_of(instruction.chunk),
          "what it hands over is not computed yet");
  const int64_t next = instruction.chunk + (up ? 1 : -1);
  require(next >= 0, "there is no chunk before it");
  State& there = states_[{instruction.microbatch, next}];
  const char* const again = "it was handed over already";
  advance(instruction, up ? state.sent_up : state.sent_down, again);
  require(!up || !there.loaded, "its inputs are there already");
  advance(instruction, up ? there.inputs : there.gradients, again);
  if (!up) there.received = true;
}

void MicrobatchRules::message(const Instruction& instruction, State& state) {
  const int64_t length = length_of(instruction.chunk);
  const char* const again = "it was begun already";
  switch (instruction.op) {
    case Op::kReceiveActivations:
      require(!state.loaded, "its inputs are there already");
      return advance(instruction, state.inputs, again);
    case Op::kReceiveGradients:
      state.received = true;
      return advance(instruction, state.gradients, again);
    default:
      break;
  }
  const bool up = instruction.op == Op::kSendActivations;
  require((up ? state.forward : state.input) == length,
          "what it sends is not computed yet");
  advance(instruction, up ? state.sent_up : state.sent_down, again);
}

void MicrobatchRules::forward(const Instruction& instruction, State& state) {
  const int64_t unit = unit_of(instruction, state.forward);
  require(instruction.unit == unit, "not this unit's turn");
  require(state.inputs == Progress::kDone, "forward: behind its inputs");
  require(!units_.documents || state.documents,
          "forward: behind where documents begin");
  require(!names_units() || !unit_at(unit).ahead || state.documents,
          "forward: behind the tokens ahead of its input's");
  if (state.forward++ == 0) peak_alive_ = std::max(peak_alive_, ++alive_);
  const bool keeps = !names_units() || !unit_at(unit).recomputed_from;
  if (keeps) state.whole.insert(unit);
}

// From a kept input on, unit by unit; what a replay gives is taken at once.
void MicrobatchRules::again(const Instruction& instruction, State& state) {
  const int64_t unit = instruction.unit;
  require(names_units() && unit_at(unit).recomputed_from,
          "its activations were kept");
  require(!state.whole.contains(unit), "recomputed twice");
  const auto& chunk = units_.chunks[instruction.chunk];
  const auto place = std::ranges::find(chunk, unit) - chunk.begin();
  require(place < length_of(instruction.chunk) - state.input,
          "it is not here, or went backward already");
  if (unit_at(unit).recomputed_from == unit) {
    require(state.replayed == -1, "what was replayed is not taken yet");
  } else {
    const int64_t before = unit_of(instruction, place - 1);
    const bool follows = state.replayed == before;
    require(follows || (state.replayed == -1 && state.whole.contains(before)),
            "its input is not there");
  }
  state.replayed = -1;
  if (instruction.op == Op::kReplay) {
    state.replayed = unit;
  } else {
    state.whole.insert(unit);
  }
}

void MicrobatchRules::backward(const Instruction& instruction, State& state) {
  require(purpose_ == Purpose::kTraining, "an evaluation goes forward alone");
  require(state.forward == length_of(instruction.chunk) &&
              (state.loss || state.gradients == Progress::kDone),
          "backward: behind its forward and its loss or gradients");
  if (is_again(instruction.op)) return again(instruction, state);
  require(state.replayed == -1, "what was replayed is not taken yet");
  if (instruction.op == Op::kBackwardWeight) {
    return weight_part(instruction, state);
  }
  require_whole(instruction, state);
  input_part(instruction, state);
  if (instruction.op == Op::kBackward) weight_part(instruction, state);
}

void MicrobatchRules::require_whole(const Instruction& instruction,
                                    const State& state) const {
  if (names_units()) unit_at(instruction.unit);
  require(state.whole.contains(instruction.unit),
          "its activations were not kept, nor recomputed");
}

// Through the units from the last to the first.
void MicrobatchRules::input_part(const Instruction& instruction, State& state) {
  const int64_t length = length_of(instruction.chunk);
  require(instruction.unit == unit_of(instruction, length - 1 - state.input),
          "not this unit's turn");
  ++state.input;
}

// Behind the unit's input part.
void MicrobatchRules::weight_part(const Instruction& instruction,
                                  State& state) {
  const int64_t length = length_of(instruction.chunk);
  bool behind = !names_units();
  for (int64_t i = 0; names_units() && i < state.input; ++i) {
    behind |= unit_of(instruction, length - 1 - i) == instruction.unit;
  }
  require(behind && state.input > 0, "behind the gradient of its input");
  require(std::ranges::count(state.weight, instruction.unit) == 0,
          "it went already");
  require_whole(instruction, state);
  state.whole.erase(instruction.unit);
  state.weight.push_back(instruction.unit);
  if (static_cast<int64_t>(state.weight.size()) == length) --alive_;
}

void MicrobatchRules::finish() {
  require(!states_.empty(), "there is no micro-batch");
  require(units_.shares_batch == (next_batch_ == Progress::kDone),
          "the next batch is shared, begun and awaited, where one rank reads "
          "for several");
  const bool trains = purpose_ == Purpose::kTraining;
  for (const auto& [key, state] : states_) {
    const auto [m, chunk] = key;
    const auto length = static_cast<size_t>(length_of(chunk));
    require(static_cast<size_t>(state.forward) == length, "micro-batch ", m,
            " never goes forward");
    require(!trains || state.weight.size() == length, "micro-batch ", m,
            " never goes backward");
    for (Progress each :
         {state.inputs, state.gradients, state.sent_up, state.sent_down}) {
      require(each != Progress::kUnderWay, "a message of micro-batch ", m,
              " was left begun");
    }
    const bool goes_on = state.sent_up == Progress::kDone;
    require(goes_on != state.loss, "micro-batch ", m,
            goes_on ? " has a loss and was sent on" : " was not sent on");
    require(!trains || goes_on == state.received, "micro-batch ", m,
            " hears of no gradient");
    const bool goes_back = state.sent_down == Progress::kDone;
    require(!trains || goes_back != state.loaded, "micro-batch ", m,
            " tells no gradient to the stage before");
  }
}

}  // namespace tessera::program::detail
