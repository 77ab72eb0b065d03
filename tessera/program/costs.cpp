#include "tessera/program/costs.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

namespace tessera::program {

double time_of(const std::string& verb, int64_t ranks, double bytes,
               const Link& link) {
  if (ranks < 2 || verb == "recv") return 0;
  const auto steps = static_cast<double>(ranks - 1);
  const double part = bytes / static_cast<double>(ranks);
  const double once = steps * (link.latency + part / link.bytes_per_time);
  if (verb == "all_reduce") {
    const double tree = std::ceil(std::log2(static_cast<double>(ranks))) *
                        (link.latency + bytes / link.bytes_per_time);
    return 2 * std::min(once, tree);
  }
  if (verb == "all_gather" || verb == "reduce_scatter" ||
      verb == "all_to_all") {
    return once;
  }
  TORCH_INTERNAL_ASSERT(verb == "broadcast" || verb == "send",
                        "no operation of ranks: ", verb);
  return link.latency + bytes / link.bytes_per_time;
}

double time_of(Op op, const Times& times) {
  switch (op) {
    case Op::kForward:
    case Op::kRecompute:
    case Op::kReplay:
      return times.forward;
    case Op::kBackward:
      return times.input + times.weight;
    case Op::kBackwardInput:
      return times.input;
    case Op::kBackwardWeight:
      return times.weight;
    default:
      return 0;
  }
}

namespace {

// The part of one unit of a chunk. The first unit of all has no gradient of
// its input, unless it is alone.
double share_of(const Instruction& each, const std::vector<int64_t>& chunk,
                const Times& times) {
  const auto size = static_cast<double>(chunk.size());
  const bool has_first = chunk.front() == 0 && chunk.size() > 1;
  if (!has_first ||
      !(each.op == Op::kBackward || each.op == Op::kBackwardInput)) {
    return time_of(each.op, times) / size;
  }
  const double input = each.unit == 0 ? 0 : times.input / (size - 1);
  return each.op == Op::kBackward ? input + times.weight / size : input;
}

}  // namespace

Work work_of_stages(std::vector<Times> stages, std::vector<Units> units,
                    int64_t passes, std::function<int64_t(int64_t)> stage_of) {
  return
      [stages = std::move(stages), units = std::move(units), passes,
       stage_of = std::move(stage_of)](int64_t rank, const Instruction& each) {
        if (!is_compute(each.op)) return 0.0;
        const int64_t stage = stage_of(rank);
        const Times& times = stages.at(stage);
        const double time =
            each.unit < 0
                ? time_of(each.op, times)
                : share_of(each, units.at(stage).chunks.at(each.chunk), times);
        return time / static_cast<double>(passes);
      };
}

namespace {

class Rates {
 public:
  Rates(const Device& device, const RankFacts& of) : device_(device), of_(of) {}

  double time_of(const Instruction& each) const {
    if (each.unit < 0) return each.op == Op::kNorm ? norm() : 0;
    const UnitFacts& unit = of_.facts.units.at(each.unit);
    switch (each.op) {
      case Op::kForward:
      case Op::kReplay:
        return part(unit.forward, each.unit);
      case Op::kRecompute:
        return of_.units.all.at(each.unit).attention_alone
                   ? longer(unit.again.flops.total(), unit.again.kept_bytes)
                   : part(unit.forward, each.unit);
      case Op::kBackward:
        return part(unit.backward_input, each.unit) +
               part(unit.backward_weight, each.unit);
      case Op::kBackwardInput:
        return part(unit.backward_input, each.unit);
      case Op::kBackwardWeight:
        return part(unit.backward_weight, each.unit);
      case Op::kLoss:
        return loss(each.unit);
      case Op::kOptimizerStep:  // read and written
        return longer(sum(each.unit, &ParameterFacts::update_flops),
                      2 * sum(each.unit, &ParameterFacts::updated_bytes));
      case Op::kKeepParameters:  // from one version to the other
        return longer(0, sum(each.unit, &ParameterFacts::parameter_bytes));
      case Op::kFetchStates:
      case Op::kReleaseStates:
        return file_time(each.unit, &ParameterFacts::optimizer_bytes);
      case Op::kFetchParameters:
      case Op::kReleaseParameters:
        return file_time(each.unit, &ParameterFacts::parameter_bytes);
      default:
        return 0;
    }
  }

 private:
  double longer(int64_t flops, int64_t bytes) const {
    return std::max(static_cast<double>(flops) / device_.flops,
                    static_cast<double>(bytes) / device_.memory_bytes);
  }
  static int64_t activation_bytes(const UnitFacts& unit) {
    return unit.input_bytes + unit.output_bytes + unit.kept_bytes;
  }
  // Of what it owns, and of its experts, who own themselves; of the head those
  // too that are tied.
  int64_t weight_bytes(int64_t unit, bool of_head) const {
    int64_t bytes = 0;
    for (int64_t owner : of_.facts.units.at(unit).reads) {
      const UnitFacts& its = of_.facts.units.at(owner);
      const bool is_own = owner == unit || its.output_bytes == 0;
      for (const auto& each : its.parameters) {
        if (is_own || (of_head && each.tied)) bytes += each.read_bytes;
      }
    }
    return bytes;
  }
  // A unit without products looks rows up, or has norms alone.
  double part(const Flops& flops, int64_t at) const {
    const UnitFacts& unit = of_.facts.units.at(at);
    int64_t bytes = activation_bytes(unit);
    if (unit.forward.matmul > 0) bytes += weight_bytes(at, /*of_head=*/false);
    return longer(flops.total(), bytes);
  }
  double loss(int64_t at) const {
    const UnitFacts& unit = of_.facts.loss;
    return longer(
        unit.forward.total() + unit.backward_input.total() +
            unit.backward_weight.total(),
        2 * (activation_bytes(unit) + weight_bytes(at, /*of_head=*/true)));
  }
  double norm() const {
    int64_t bytes = 0;
    for (int64_t owner : of_.units.owners()) {
      bytes += sum(owner, &ParameterFacts::shard_gradient_bytes);
    }
    return longer(0, bytes);
  }
  double file_time(int64_t unit, int64_t ParameterFacts::* bytes) const {
    return static_cast<double>(sum(unit, bytes)) / device_.file_bytes;
  }
  // Of all that this rank holds of them.
  int64_t sum(int64_t unit, int64_t ParameterFacts::* number) const {
    const bool runs_here = std::ranges::any_of(
        of_.units.chunks,
        [&](const auto& chunk) { return std::ranges::count(chunk, unit) > 0; });
    const UnitFacts& of = of_.facts.units.at(unit);
    int64_t all = 0;
    for (const auto& each : of.parameters) {
      if (holds(of, each, runs_here)) all += each.*number;
    }
    return all;
  }

  const Device& device_;
  const RankFacts& of_;
};

}  // namespace

Work work_of_device(const Device& device,
                    std::function<const RankFacts&(int64_t rank)> of) {
  return [device, of = std::move(of)](int64_t rank, const Instruction& each) {
    return Rates(device, of(rank)).time_of(each);
  };
}

Work work_of_measured(const Measured& measured) {
  using Key = std::tuple<int64_t, Op, int64_t, int64_t>;
  struct Mean {
    double sum = 0;
    int64_t count = 0;
  };
  std::map<Key, Mean> means;
  for (const auto& [rank, times] : measured) {
    for (const auto& [each, seconds] : times) {
      Mean& mean = means[{rank, each.op, each.unit, each.chunk}];
      mean.sum += seconds;
      ++mean.count;
    }
  }
  return [means = std::move(means)](int64_t rank, const Instruction& each) {
    const auto found = means.find({rank, each.op, each.unit, each.chunk});
    if (found == means.end()) return 0.0;
    return found->second.sum / static_cast<double>(found->second.count);
  };
}

}  // namespace tessera::program
