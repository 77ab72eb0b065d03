#include "tessera/train/memory_check.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/memory_kind.h"
#include "tessera/core/units.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/monitor/memory.h"

namespace tessera::train {

using engine::RunConfig;

namespace {

// What the ranks of a host hold at most, against what it has.
struct Need {
  engine::MemoryPlan fullest;  // of a rank
  int64_t bytes = 0, limit = 0;
  int64_t kept = 0;  // of these bytes, by checkpoint.local_every
  bool fits() const { return limit == 0 || bytes <= limit; }
};

// Of the ranks of a host; `of`: of a rank.
template <typename Of>
int64_t bytes_together(const RunConfig& config, const HostRanks& ranks,
                       const std::vector<engine::MemoryPlan>& plans,
                       const Of& of) {
  const auto mesh = mesh_of(config, implied_world_size(config));
  int64_t bytes = 0;
  for (int64_t i = 0; i < ranks.count; ++i) {
    const mesh::Coord coord = mesh.coord_of(ranks.first + i);
    bytes += std::invoke(of, plans.at(coord[mesh::Axis::kPp]));
  }
  return bytes;
}

bool saves_in_memory(const RunConfig& config, program::Purpose purpose) {
  return purpose == program::Purpose::kTraining &&
         config.checkpoint.saves_locally() &&
         lies_in_memory(existing_part(config.checkpoint.local_dir));
}

Need need_of(const RunConfig& config, const HostRanks& ranks,
             int64_t host_bytes, program::Purpose purpose) {
  auto plans = engine::memory_plans(config, purpose);
  for (size_t stage = 0; stage < plans.size(); ++stage) {
    const auto device = config.run.device_of_stage(static_cast<int64_t>(stage));
    if (device == at::kCPU) continue;
    plans[stage] = {.copies = plans[stage].copies};  // else memory of its own
  }
  const auto bytes_of = [&](const auto& of) {
    return bytes_together(config, ranks, plans, of);
  };
  // What several ranks hold alike one of them copies.
  const int64_t copies_twice = std::max<int64_t>(
      0, bytes_of(&engine::MemoryPlan::copies) - checkpoint_bytes(config));
  const int64_t kept = saves_in_memory(config, purpose)
                           ? local_checkpoint_bytes(config, ranks)
                           : 0;
  return {.fullest =
              *std::ranges::max_element(plans, {}, &engine::MemoryPlan::total),
          .bytes = bytes_of(&engine::MemoryPlan::total) - copies_twice + kept,
          .limit = host_bytes,
          .kept = kept};
}

// The largest zero.prefetch below the configured one that fits, -1: none. From
// as many units on as there are it makes no difference.
int64_t fitting_prefetch(RunConfig config, const HostRanks& ranks,
                         int64_t host_bytes, program::Purpose purpose) {
  const auto fits = [&](int64_t prefetch) {
    config.zero.prefetch = prefetch;
    return need_of(config, ranks, host_bytes, purpose).fits();
  };
  const int64_t units = 2 * config.model.num_blocks() + 2;
  int64_t too_many = std::min(config.zero.prefetch, units);
  if (too_many <= 0 || !fits(0)) return -1;
  int64_t fitting = 0;
  while (too_many - fitting > 1) {
    const int64_t middle = fitting + (too_many - fitting) / 2;
    (fits(middle) ? fitting : too_many) = middle;
  }
  return fitting;
}

// What would make ranks hold less, and has not been done.
std::vector<std::string> ways_to_need_less(const RunConfig& config,
                                           const HostRanks& ranks,
                                           program::Purpose purpose) {
  std::vector<std::string> ways;
  const auto add = [&](bool helps, const char* way) {
    if (helps) ways.emplace_back(way);
  };
  const bool trains = purpose == program::Purpose::kTraining;
  add(ranks.count > 1, "fewer of the ranks on this host");
  add(data_parallel_degree(config) > 1 && config.zero.stage < 3,
      "a higher zero.stage");
  add(trains && config.batch.micro > 1, "a smaller batch.micro");
  add(!trains && config.batch.micro > 1, "a smaller --batch");
  add(trains && config.recompute.mode == "none", "recompute.mode block");
  add(trains && config.checkpoint.async, "checkpoint.async false");
  add(saves_in_memory(config, purpose), "checkpoint.local_every 0");
  const bool on_cpu = config.run.is_on_cpu();
  const bool has_files = trains && !config.mesh.star();
  const bool offloads = config.zero.offloads();
  add(has_files && !config.zero.offloads_parameters() && on_cpu,
      offloads ? "zero.offload all" : "zero.offload optimizer or all");
  add(has_files && !config.zero.offloads_parameters() && !on_cpu,
      offloads ? "zero.offload all with zero.stage 3"
               : "zero.offload optimizer, or all with zero.stage 3,");
  add(!trains && config.precision.compute != "bf16", "--dtype bf16");
  ways.emplace_back(on_cpu ? "a host with more memory"
                           : "a device with more memory");
  return ways;
}

}  // namespace

void check_memory(const RunConfig& of, const HostRanks& ranks,
                  int64_t host_bytes, program::Purpose purpose) {
  // Devices have memory of their own.
  const bool needs_host = of.checkpoint.async || saves_in_memory(of, purpose) ||
                          std::ranges::count(of.run.device_types, at::kCPU);
  if (!needs_host) return;
  RunConfig config = of;
  config.resolve(share_memory(config, ranks));
  const Need need = need_of(config, ranks, host_bytes, purpose);
  if (need.fits()) return;
  const std::string found = c10::str(
      "the ranks of this host hold at most ", bytes_text(need.bytes),
      ", the fullest ", bytes_text(need.fullest.states),
      " of model states and ", bytes_text(need.fullest.work), " beside them",
      need.fullest.copies == 0
          ? ""
          : c10::str(", and ", bytes_text(need.fullest.copies),
                     " copied for each checkpoint"),
      need.kept == 0 ? ""
                     : c10::str(", with ", bytes_text(need.kept), " in ",
                                config.checkpoint.local_dir),
      ", but the host has ", bytes_text(need.limit));
  const int64_t prefetch = fitting_prefetch(config, ranks, host_bytes, purpose);
  TS_CHECK_CONFIG(prefetch < 0, "zero.prefetch is ", config.zero.prefetch, ": ",
                  found, ". Nearest: ", prefetch, ".");
  TS_CHECK_CONFIG(false, "memory: ", found, ". Use ",
                  c10::Join(" or ", ways_to_need_less(config, ranks, purpose)),
                  ".");
}

std::string out_of_memory_text(const c10::OutOfMemoryError& error) {
  const std::string words = message_of(error);
  return "memory of the device: " + words.substr(0, words.find('\n'));
}

void refuse_out_of_memory(const RunConfig& config,
                          const c10::OutOfMemoryError& error,
                          program::Purpose purpose, ExitCode code) {
  // What it was making when it ended may be gone by now.
  const auto held = [](MemoryKind kind) {
    return bytes_text(monitor::tensor_bytes(kind).peak);
  };
  const bool trains = purpose == program::Purpose::kTraining;
  const std::string beside_parameters =
      trains
          ? c10::str(", ", held(MemoryKind::kGradients), " of gradients and ",
                     held(MemoryKind::kOptimizer), " of the optimizer's states")
          : "";
  TS_CHECK_CODE(false, code, out_of_memory_text(error), " This rank held ",
                held(MemoryKind::kParameters), " of parameters",
                beside_parameters, ", and up to ", held(MemoryKind::kWork),
                " beside them. Use ",
                c10::Join(" or ", ways_to_need_less(config, {}, purpose)), ".");
}

int64_t memory_of_host() {
  const char* const said = std::getenv("TESSERA_HOST_MEMORY");
  if (said == nullptr) return monitor::host_memory_bytes();
  const auto bytes = parse_bytes(said);
  TS_CHECK_CONFIG(bytes && *bytes > 0, "TESSERA_HOST_MEMORY is \"", said,
                  "\". It is a number of bytes, as in 16G.");
  return *bytes;
}

int64_t bytes_in_files(const RunConfig& config, const HostRanks& ranks) {
  return bytes_together(config, ranks, engine::memory_plans(config),
                        &engine::MemoryPlan::in_files);
}

int64_t local_checkpoint_bytes(const RunConfig& config,
                               const HostRanks& ranks) {
  constexpr int64_t kAtOnce = 2;
  // What several ranks hold alike one of them saves.
  const int64_t saved =
      std::min(checkpoint_bytes(config),
               bytes_together(config, ranks, engine::memory_plans(config),
                              &engine::MemoryPlan::saved));
  const bool has_others = ranks.count < implied_world_size(config);
  const int64_t copies = has_others ? saved : 0;
  return kAtOnce * (saved + copies);
}

bool share_memory(const RunConfig& config, const HostRanks& ranks) {
  const std::string& backend = config.comm.backend;
  return ranks.count == implied_world_size(config) &&
         (backend == "auto" || backend == "shm");
}

}  // namespace tessera::train
