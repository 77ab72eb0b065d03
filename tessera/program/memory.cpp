#include "tessera/program/memory.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace tessera::program {
namespace {

class Walk {
 public:
  // `trains`: else forwards keep nothing for a backward.
  Walk(const Units& units, const Facts& facts, bool trains)
      : units_(units),
        facts_(facts),
        trains_(trains),
        alive_(facts.shared_bytes + facts.shared_batch_bytes) {
    for (const auto& chunk : units.chunks) {
      for (int64_t unit : chunk) runs_here_.insert(unit);
    }
  }

  void take(const Instruction& each) {
    during_ = alive_;
    switch (each.op) {
      case Op::kLoadInputs:
      case Op::kLoadTargets:
      case Op::kLoadDocuments:
        // One read has all.
        if (loaded_.emplace(each.microbatch, each.version).second) {
          alive_ += facts_.batch_bytes;
          // An evaluation is given its batch: it is there all the time.
          if (trains_) during_ = alive_ + facts_.whole_batch_bytes;
        }
        break;
      case Op::kShareBatch:
        if (each.phase != Phase::kAwait) alive_ += facts_.shared_batch_bytes;
        break;
      case Op::kForward:
      case Op::kRecompute:
      case Op::kReplay:
        forward(each);
        break;
      case Op::kLoss:
        loss(each);
        break;
      case Op::kBackward:
        backward(each);
        break;
      case Op::kBackwardInput:
      case Op::kBackwardWeight:
        split_backward(each);
        break;
      case Op::kHandActivations:
        handed_.insert({each.microbatch, each.chunk + 1});
        break;
      case Op::kHandGradients: {
        Instruction of = each;
        of.unit = first_of(each);
        let_go_of_kept(of);
        break;
      }
      case Op::kFreeParameters:
        alive_ -= sum(each.unit, &ParameterFacts::gathered_bytes);
        break;
      case Op::kAllocateGradients:
        alive_ += sum(each.unit, &ParameterFacts::whole_gradient_bytes);
        break;
      case Op::kOptimizerStep:
        update(each.unit);
        break;
      case Op::kNextVersion:
        alive_ -=
            facts_.batch_bytes *
            static_cast<int64_t>(std::erase_if(loaded_, [&](const auto& batch) {
              return batch.second == each.version;
            }));
        break;
      case Op::kFetchStates:
      case Op::kFetchParameters:
        if (each.phase != Phase::kAwait) alive_ += in_files(each);
        break;
      case Op::kReleaseStates:
      case Op::kReleaseParameters:
        alive_ -= in_files(each);
        break;
      default:
        communicate(each);
    }
    during_ = std::max(during_, alive_);
  }

  int64_t alive() const { return alive_; }
  int64_t during() const { return during_; }

 private:
  const UnitFacts& first(const Instruction& each) const {
    return facts_.units.at(units_.chunks.at(each.chunk).front());
  }
  const UnitFacts& last(const Instruction& each) const {
    return facts_.units.at(units_.chunks.at(each.chunk).back());
  }

  // The unit in front of one whose input was not received: it is here too, in
  // this chunk or at the end of the one before. An evaluation passes some over.
  int64_t before(const Instruction& each) const {
    const auto& chunk = units_.chunks.at(each.chunk);
    const auto own = std::ranges::find(chunk, each.unit);
    return own == chunk.begin() ? units_.chunks.at(each.chunk - 1).back()
                                : *std::prev(own);
  }

  void use(int64_t beside) { during_ = std::max(during_, alive_ + beside); }

  // What keeps nothing lets go of its input, unless the forward will start
  // there again.
  void forward(const Instruction& each) {
    const UnitFacts& unit = facts_.units.at(each.unit);
    const auto from = units_.all[each.unit].recomputed_from;
    const bool partly = units_.all[each.unit].attention_alone;
    if (partly && each.op == Op::kRecompute) {
      use(unit.again.peak_bytes);
      alive_ += unit.again.kept_bytes;
      return;
    }
    const bool keeps =
        trains_ && (each.op == Op::kRecompute ||
                    (each.op == Op::kForward && (!from.has_value() || partly)));
    use(keeps ? unit.forward_peak_bytes : unit.plain_forward_peak_bytes);
    alive_ += unit.output_bytes + (keeps ? unit.kept_bytes : 0);
    outputs_.insert({each.microbatch, each.unit});
    if (keeps) graphs_.insert({each.microbatch, each.unit});
    if (!keeps && (!trains_ || from != each.unit)) let_go_of_input(each);
  }

  // The output of the unit before, or what was received.
  void let_go_of_input(const Instruction& each) {
    if (each.unit == 0) return;
    if (!is_first(each)) return let_go_of_output(each, before(each));
    alive_ -= facts_.units.at(each.unit).input_bytes;
  }

  // An output stays while it is on its way to the next stage.
  void let_go_of_output(const Instruction& of, int64_t unit) {
    if (outputs_.erase({of.microbatch, unit}) == 0) return;
    const Place place{of.microbatch, of.chunk};
    if (units_.chunks.at(of.chunk).back() == unit && sent_.erase(place) > 0) {
      outlived_.insert(place);
    } else {
      alive_ -= facts_.units.at(unit).output_bytes;
    }
  }

  // What the head takes becomes its own gradient: that of the output, which is
  // computed again where its activations are.
  void loss(const Instruction& each) {
    const UnitFacts& loss = facts_.loss;
    if (trains_) {
      add_gradients(kOfLoss, loss,
                    {loss.forward_peak_bytes, loss.first_backward_peak_bytes});
    } else {
      use(loss.plain_forward_peak_bytes);
      alive_ -= loss.input_bytes;
    }
    if (!has_graph(each, each.unit)) {
      outputs_.erase({each.microbatch, each.unit});
    }
  }

  // Input, output, what was kept and the output's gradient are there; behind it
  // is the input's gradient, in place of all of these but the input: it is the
  // output of the unit before, which is where the backward of that one starts,
  // or was received and stays until its gradient is sent.
  void backward(const Instruction& each) {
    const UnitFacts& unit = facts_.units.at(each.unit);
    add_gradients(each.unit, unit,
                  {unit.backward_peak_bytes, unit.first_backward_peak_bytes});
    go_back(each);
  }

  // Rows that wait come to be in a step's first micro-batch, and go with its
  // last.
  struct Peaks {
    int64_t any, first;
  };
  void add_gradients(int64_t unit, const UnitFacts& of, const Peaks& peaks) {
    const bool is_first = added_[unit]++ == 0 && of.waiting_bytes > 0;
    use(is_first ? peaks.first : peaks.any);
    if (is_first) alive_ += of.waiting_bytes;
    if (added_[unit] < facts_.batches) return;
    alive_ -= of.waiting_bytes;
    added_[unit] = 0;
  }

  void go_back(const Instruction& each) {
    const UnitFacts& unit = facts_.units.at(each.unit);
    let_go(each);
    if (each.unit == 0) return;
    alive_ += unit.input_bytes;
    if (is_first(each)) received_.insert({each.microbatch, each.chunk});
  }

  void let_go(const Instruction& each) {
    const UnitFacts& unit = facts_.units.at(each.unit);
    alive_ -= unit.kept_bytes;
    if (units_.all[each.unit].attention_alone) alive_ -= unit.again.kept_bytes;
    const bool is_own_gradient =
        is_last(each.unit) && !units_.all[each.unit].recomputed_from;
    if (!is_own_gradient) alive_ -= unit.output_bytes;
    let_go_of_output(each, each.unit);
    graphs_.erase({each.microbatch, each.unit});
    if (each.unit != 0 && each.unit != first_of(each)) let_go_of_kept(each);
  }

  // Of a unit's input, if nobody else needs it.
  void let_go_of_kept(const Instruction& each) {
    if (!has_graph(each, each.unit - 1)) let_go_of_output(each, each.unit - 1);
  }

  // What the first part leaves to the second stays between them.
  void split_backward(const Instruction& each) {
    const UnitFacts& unit = facts_.units.at(each.unit);
    if (each.op == Op::kBackwardWeight) {
      add_gradients(
          each.unit, unit,
          {unit.weight_part_peak_bytes, unit.first_weight_part_peak_bytes});
      alive_ -= unit.put_off_bytes;
      return;
    }
    use(unit.input_part_peak_bytes);
    go_back(each);
    alive_ += unit.put_off_bytes;
  }

  void communicate(const Instruction& each) {
    const bool begins = each.phase == Phase::kBegin;
    const Place place{each.microbatch, each.chunk};
    switch (each.op) {
      case Op::kSendActivations:
        if (begins) {
          send(each);
          return;
        }
        sent_.erase(place);
        if (outlived_.erase(place) > 0) alive_ -= last(each).output_bytes;
        return;
      case Op::kReceiveActivations:
        if (begins) alive_ += first(each).input_bytes;
        return;
      case Op::kReceiveGradients:
        if (begins) alive_ += last(each).output_bytes;
        return;
      case Op::kSendGradients:
        if (!begins || received_.erase(place) > 0) {
          alive_ -= first(each).input_bytes;
        }
        return;
      case Op::kGatherParameters: {
        const int64_t work = sum(each.unit, &ParameterFacts::gather_work_bytes);
        const int64_t whole = sum(each.unit, &ParameterFacts::gathered_bytes);
        alive_ += begins ? work + whole : -work;
        return;
      }
      case Op::kReduceGradients:
        return reduce(each.unit, begins);
      case Op::kGatherUpdates:
        return gather_updates(each.unit, begins);
      case Op::kSumGradients:
        if (!begins) alive_ -= waiting_for_sum(each.unit);
        return;
      default:
        return;
    }
  }

  // A piece is sent until the gather is awaited.
  void gather_updates(int64_t unit, bool begins) {
    const int64_t sent = sum(unit, &ParameterFacts::update_piece_bytes);
    alive_ += begins ? sent + sum(unit, &ParameterFacts::update_gathered_bytes)
                     : -sent;
    if (begins) use(most(unit, &ParameterFacts::piece_work_bytes));
  }

  void update(int64_t unit) {
    if (unit < 0) return;
    use(most(unit, &ParameterFacts::update_work_bytes));
    alive_ -= sum(unit, &ParameterFacts::update_gathered_bytes);
  }

  // Without a graph nobody but the message holds it.
  void send(const Instruction& each) {
    const Place place{each.microbatch, each.chunk};
    const int64_t unit = units_.chunks.at(each.chunk).back();
    if (has_graph(each, unit)) {
      sent_.insert(place);
    } else if (outputs_.erase({each.microbatch, unit}) > 0) {
      outlived_.insert(place);
    }
  }

  // Packed while they are still whole, which they need not be behind it. In
  // stage 1 what was reduced waits for its sum, if there is one.
  void reduce(int64_t unit, bool begins) {
    const int64_t work = sum(unit, &ParameterFacts::reduce_work_bytes);
    if (!begins) {
      alive_ -= work - waiting_for_sum(unit);
      return;
    }
    for (const auto& each : held(unit)) {
      use(each.pack_bytes);
      alive_ += each.reduce_work_bytes - each.whole_gradient_bytes;
    }
  }

  int64_t waiting_for_sum(int64_t unit) const {
    int64_t total = 0;
    for (const auto& each : held(unit)) {
      if (each.zero_stage == 1) total += each.sum_message_bytes;
    }
    return total;
  }

  int64_t in_files(const Instruction& each) const {
    const bool of_optimizer =
        each.op == Op::kFetchStates || each.op == Op::kReleaseStates;
    return sum(each.unit, of_optimizer ? &ParameterFacts::optimizer_bytes
                                       : &ParameterFacts::parameter_bytes);
  }

  bool has_graph(const Instruction& each, int64_t unit) const {
    return graphs_.contains({each.microbatch, unit});
  }
  int64_t first_of(const Instruction& each) const {
    return units_.chunks.at(each.chunk).front();
  }
  // Its input was received: what was handed over is the output of the unit
  // before.
  bool is_first(const Instruction& each) const {
    return first_of(each) == each.unit &&
           !handed_.contains({each.microbatch, each.chunk});
  }
  // Its output becomes its own gradient.
  bool is_last(int64_t unit) const {
    return facts_.units.at(unit).output_bytes == facts_.loss.input_bytes &&
           runs_last(unit);
  }
  bool runs_last(int64_t unit) const {
    for (size_t i = unit + 1; i < facts_.units.size(); ++i) {
      if (facts_.units[i].output_bytes > 0) return false;
    }
    return true;
  }

  std::vector<ParameterFacts> held(int64_t unit) const {
    const UnitFacts& of = facts_.units.at(unit);
    std::vector<ParameterFacts> here;
    std::ranges::copy_if(of.parameters, std::back_inserter(here),
                         [&](const ParameterFacts& each) {
                           return holds(of, each, runs_here_.contains(unit));
                         });
    return here;
  }

  int64_t most(int64_t unit, int64_t ParameterFacts::* bytes) const {
    int64_t found = 0;
    for (const auto& each : held(unit)) found = std::max(found, each.*bytes);
    return found;
  }

  int64_t sum(int64_t unit, int64_t ParameterFacts::* bytes) const {
    int64_t total = 0;
    for (const auto& each : held(unit)) total += each.*bytes;
    return total;
  }

  const Units& units_;
  const Facts& facts_;
  const bool trains_;
  std::set<int64_t> runs_here_;
  std::map<int64_t, int64_t> loaded_;  // micro-batches, and their versions
  using Place = std::pair<int64_t, int64_t>;  // micro-batch, chunk
  // Inputs that were received, until their gradients are sent; outputs that are
  // being sent, and those of them that nothing else holds.
  std::set<Place> received_, sent_, outlived_;
  // Of each unit, micro-batches whose gradients of weights were added.
  static constexpr int64_t kOfLoss = -1;
  std::map<int64_t, int64_t> added_;
  std::set<Place> handed_;  // whose input is the output of the chunk before
  // By micro-batch and unit: outputs that the unit, or the one behind it,
  // holds; and units whose activations are there.
  std::set<std::pair<int64_t, int64_t>> outputs_, graphs_;
  int64_t alive_ = 0, during_ = 0;
};

}  // namespace

int64_t Memory::peak() const {
  return during.empty() ? 0 : *std::ranges::max_element(during);
}

Memory memory_of(const Program& program, const Units& units,
                 const Facts& facts) {
  Walk walk(units, facts, trains(program));
  Memory memory;
  for (const auto& each : program) {
    walk.take(each);
    memory.behind.push_back(walk.alive());
    memory.during.push_back(walk.during());
  }
  return memory;
}

}  // namespace tessera::program
