// The measurement behind `tessera bench step`: where a step's time goes, beside
// its floor (engine/product_floor.h).
//
// Rounds: in each, the floor and then a step, one behind the other: a host that
//         is slower for a while is so for both. Ranks begin both together.
// Data:   random tokens, which are there: no reading, no tokenizing.
// Units:  seconds, bytes; FLOPs count a multiplication and an addition as two.
// Comm:   collective over the world.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/benchmark/device_times.h"
#include "tessera/benchmark/kernel_times.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/memory_kind.h"
#include "tessera/engine/product_floor.h"
#include "tessera/engine/run_config.h"
#include "tessera/monitor/timeline.h"

namespace tessera::benchmark {

// In a step, on this rank.
struct InstructionTime {
  std::string name;   // "Forward"
  int64_t unit = -1;  // -1: of the chunk, or of all
  int64_t count = 0;
  double seconds = 0;
};

struct Spread {
  double median = 0, fastest = 0, slowest = 0;
};
Spread spread_of(std::vector<double> values);

// What a rank tells the others.
struct RankTimes {
  double step_s = 0, floor_s = 0, exposed_s = 0, bubble = 0;
};

struct StepTimes {
  Spread step, floor;
  double over_floor = 0;  // the median of what each round had
  // Means over the rounds.
  monitor::Timeline timeline;
  std::vector<InstructionTime> instructions;
  // Of one step more. On a GPU its own kernels, not the host's operators.
  std::vector<KernelTime> kernels;
  DeviceTimes device;  // nothing on a CPU
  std::vector<engine::FloorProduct> products;
  double floor_flops = 0;
  // In tensors when a step begins, by what they are for; and at most.
  std::array<int64_t, kNumMemoryKinds> bytes{};
  int64_t peak_bytes = 0;
  int64_t planned_bytes = 0;  // by the facts, of a rank of the same stage
  double page_faults = 0;     // of this process, in a round
  int64_t threads = 0;
  std::vector<RankTimes> ranks;
};

// REQUIRES: a completed configuration; rounds > 0.
StepTimes measure_step(const engine::RunConfig& config,
                       comm::Communicator& ranks, int64_t rounds);

}  // namespace tessera::benchmark
