#include "tessera/benchmark/step.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <utility>

#include "tessera/core/device.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/rank_model.h"
#include "tessera/engine/recorder.h"
#include "tessera/engine/run_devices.h"
#include "tessera/mesh/axis.h"
#include "tessera/monitor/memory.h"
#include "tessera/verify/random_batch.h"

namespace tessera::benchmark {
namespace {

using Clock = std::chrono::steady_clock;
using engine::RankModel;
using engine::RunConfig;

constexpr int64_t kWarmUps = 2;

int64_t page_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

std::string name_of(const program::Instruction& instruction) {
  const char* phase = instruction.phase == program::Phase::kBegin   ? "begin "
                      : instruction.phase == program::Phase::kAwait ? "await "
                                                                    : "";
  return phase + std::string(program::name_of(instruction.op));
}

class StepBench {
 public:
  StepBench(const RunConfig& config, comm::Communicator& ranks)
      : config_(config),
        ranks_(ranks),
        model_(config, ranks),
        recorder_(model_.composed(), ranks.rank()),
        floor_(floor_of_a_step()) {}

  StepTimes measure(int64_t rounds) {
    for (int64_t i = 0; i < kWarmUps; ++i) step();
    last_.clear();
    monitor::reset_tensor_peak();
    for (size_t kind = 0; kind < kNumMemoryKinds; ++kind) {
      times_.bytes[kind] =
          monitor::tensor_bytes(static_cast<MemoryKind>(kind)).now;
    }
    times_.bytes[static_cast<size_t>(MemoryKind::kWork)] -= floor_bytes_;
    std::vector<double> steps, floors, over;
    const int64_t faults = page_faults();
    for (int64_t i = 0; i < rounds; ++i) {
      meet();
      floors.push_back(floor_.run());
      meet();
      steps.push_back(step());
      over.push_back(steps.back() / floors.back());
      take(steps.back(), static_cast<double>(rounds));
    }
    times_.page_faults = static_cast<double>(page_faults() - faults) /
                         static_cast<double>(rounds);
    times_.step = spread_of(steps);
    times_.floor = spread_of(floors);
    times_.over_floor = spread_of(over).median;
    times_.peak_bytes = monitor::tensor_bytes().peak - floor_bytes_;
    times_.planned_bytes = planned_bytes();
    times_.products = floor_.products();
    times_.floor_flops = floor_.flops();
    times_.threads = at::get_num_threads();
    for (auto& [key, time] : instructions_) {
      time.count /= rounds;  // the same in each
      times_.instructions.push_back(time);
    }
    profile();
    if (model_.goes_on()) step(/*is_last=*/true);
    exchange();
    return times_;
  }

 private:
  // With nothing left open.
  engine::RunConfig here() const {
    return config_.with(model_.composed().model.config);
  }

  int64_t planned_bytes() const {
    const int64_t stage = model_.composed().coord[mesh::Axis::kPp];
    return engine::memory_plans(here()).at(stage).on_device();
  }

  engine::ProductFloor floor_of_a_step() const {
    const auto& composed = model_.composed();
    const auto facts = engine::facts_of(here(), composed.mesh, composed.coord);
    return {
        engine::products_of(model_.program(), composed.units, facts),
        at::TensorOptions(config_.precision.compute_dtype()).device(device_),
        facts.batches};
  }

  engine::StepInput input_of(int64_t step) const {
    return engine::step_input(config_, step, config_.optimizer.lr,
                              [this](int64_t of, int64_t first, int64_t count) {
                                return verify::random_batch(config_, of, first,
                                                            count);
                              });
  }

  // Where the schedule goes on, between two others but for the last one.
  double step(bool is_last = false) {
    const auto start = Clock::now();
    begin(is_last);
    // What instructions took is then the time to ask a device for it.
    wait_for_device(device_);
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  void begin(bool is_last) {
    recorder_.begin_step(++steps_, engine::accumulation(config_));
    std::optional<engine::StepInput> next;
    if (model_.goes_on() && !is_last) next = input_of(steps_ + 1);
    model_.step(
        input_of(steps_),
        [this, observer = recorder_.observer()](
            const program::Instruction& instruction, double begin_s,
            double end_s) {
          observer(instruction, begin_s, end_s);
          last_.emplace_back(instruction, end_s - begin_s);
        },
        std::move(next));
  }

  // Means over the rounds of what the last step was.
  void take(double step_s, double rounds) {
    const auto timeline = monitor::timeline_of(recorder_.spans(), step_s);
    for (size_t kind = 0; kind < monitor::kNumSpanKinds; ++kind) {
      times_.timeline.seconds[kind] += timeline.seconds[kind] / rounds;
      times_.timeline.exposed[kind] += timeline.exposed[kind] / rounds;
    }
    times_.timeline.bubble += timeline.bubble / rounds;
    for (const auto& [instruction, seconds] : last_) {
      const InstructionTime own{.name = name_of(instruction),
                                .unit = instruction.unit};
      auto& time =
          instructions_.try_emplace({own.name, own.unit}, own).first->second;
      time.seconds += seconds / rounds;
      ++time.count;
    }
    last_.clear();
  }

  void profile() {
    if (device_ != at::kCPU) {
      if (ranks_.rank() > 0) {  // it traces the whole process, and is told of
        step();
        return;
      }
      DeviceTrace trace;
      begin(/*is_last=*/false);
      times_.device = trace.taken();
      times_.kernels = times_.device.kernels;
      return;
    }
    const KernelTimes times;
    step();
    times_.kernels = KernelTimes::taken();
  }

  void exchange() {
    comm::Group& world = ranks_.world();
    at::Tensor mine =
        at::tensor({times_.step.median, times_.floor.median,
                    times_.timeline.exposed_comm_s(), times_.timeline.bubble},
                   at::kDouble);
    at::Tensor all = at::empty({world.size(), mine.numel()}, at::kDouble);
    world.all_gather(all, mine).synchronize();
    for (int64_t r = 0; r < world.size(); ++r) {
      const auto* of = all[r].const_data_ptr<double>();
      times_.ranks.push_back({of[0], of[1], of[2], of[3]});
    }
  }

  void meet() {
    at::Tensor one = at::zeros({1});
    ranks_.world().all_reduce(one).synchronize();
  }

  const RunConfig& config_;
  comm::Communicator& ranks_;
  const c10::DeviceType device_ =
      engine::device_of_rank(config_, ranks_.rank());
  RankModel model_;
  engine::Recorder recorder_;
  const int64_t before_floor_ = monitor::tensor_bytes().now;
  engine::ProductFloor floor_;
  const int64_t floor_bytes_ = monitor::tensor_bytes().now - before_floor_;
  int64_t steps_ = 0;
  std::vector<std::pair<program::Instruction, double>> last_;
  std::map<std::pair<std::string, int64_t>, InstructionTime> instructions_;
  StepTimes times_;
};

}  // namespace

Spread spread_of(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t half = values.size() / 2;
  const double median = values.size() % 2 == 1
                            ? values[half]
                            : (values[half - 1] + values[half]) / 2;
  return {median, values.front(), values.back()};
}

StepTimes measure_step(const RunConfig& config, comm::Communicator& ranks,
                       int64_t rounds) {
  return StepBench(config, ranks).measure(rounds);
}

}  // namespace tessera::benchmark
