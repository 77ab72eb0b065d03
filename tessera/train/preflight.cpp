#include "tessera/train/preflight.h"

#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <ranges>
#include <sstream>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/host.h"
#include "tessera/core/units.h"
#include "tessera/core/vectors.h"
#include "tessera/data/file_list.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/model_cut.h"
#include "tessera/engine/reader.h"
#include "tessera/engine/step_programs.h"
#include "tessera/models/model.h"
#include "tessera/monitor/memory.h"
#include "tessera/nn/kernel_choice.h"
#include "tessera/train/data_setup.h"
#include "tessera/train/resumed_run.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/state.h"
#include "tessera/train/text_samples.h"
#include "tessera/train/trained_model.h"

namespace tessera::train {

using engine::RunConfig;

namespace {

// A line for each axis along which there is more than one rank, and where the
// experts are.
std::string groups_text(const RunConfig& config, const mesh::DeviceMesh& mesh) {
  using mesh::Axis;
  std::string text;
  const auto line = [&](const std::string& name, const std::string& groups) {
    text += std::string(text.empty() ? "groups      " : "            ") + name +
            " " + groups + "\n";
  };
  const auto axis_line = [&](Axis axis) {
    if (mesh.degree(axis) == 1) return;
    line(mesh::name_of(axis), mesh.describe_groups(axis));
  };
  for (Axis axis : mesh.order()) axis_line(axis);
  const int64_t experts = config.model.moe.experts;
  if (experts == 0) return text;
  for (Axis axis : mesh::kExpertAxes) {
    if (axis != Axis::kPp) axis_line(axis);
  }
  if (mesh.degree(Axis::kEp) == 1) return text;
  const int64_t each = experts / mesh.degree(Axis::kEp);
  constexpr size_t kNamedAtMost = 16;  // ranks, and lines
  const auto holders = mesh.peers(0, {Axis::kEp});
  for (size_t i = 0; i < holders.size(); ++i) {
    if (i == kNamedAtMost) {
      line("experts", "... on the other ranks");
      break;
    }
    const int64_t first = mesh.coord_of(holders[i])[Axis::kEp] * each;
    std::vector<std::string> ranks;
    for (int64_t peer :
         mesh.peers(holders[i], {Axis::kPp, Axis::kExpertReplicate,
                                 Axis::kExpertDp, Axis::kEtp})) {
      ranks.push_back(std::to_string(peer));
    }
    line("experts", std::to_string(first) + "-" +
                        std::to_string(first + each - 1) + " on ranks " +
                        some_of(ranks, kNamedAtMost));
  }
  return text;
}

std::string batch_text(const RunConfig& config) {
  const int64_t degree = data_parallel_degree(config);
  const int64_t count = accumulation(config);
  const std::string whole = c10::str(config.batch.global, " samples = ");
  return has_uneven_batch(config)
             ? c10::str(whole, samples_of_microbatch(config),
                        " on data-parallel degree ", degree, " x accumulation ",
                        count)
             : c10::str(whole, "micro ", config.batch.micro, " x accumulation ",
                        count, " x data-parallel degree ", degree);
}

std::string shares_line(const RunConfig& config) {
  const std::string shares = engine::shares_text(config);
  return shares.empty() ? "" : "            " + shares + "\n";
}

// What the ranks of a host hold at most, against what it has.
struct Need {
  engine::MemoryPlan fullest;  // of a rank
  int64_t bytes = 0, limit = 0;
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
  return {*std::ranges::max_element(plans, {}, &engine::MemoryPlan::total),
          bytes_of(&engine::MemoryPlan::total) - copies_twice, host_bytes};
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

bool share_memory(const RunConfig& config, const HostRanks& ranks) {
  const std::string& backend = config.comm.backend;
  return ranks.count == implied_world_size(config) &&
         (backend == "auto" || backend == "shm");
}

// What the environment names must be there.
void check_choices() {
  engine::passes_chosen();
  nn::check_kernels_chosen();
  widest_vectors();
}

// Room for states in files, where it helps: files of a file system that lies in
// memory are there twice over.
void check_offload_folder(const RunConfig& config, const std::string& folder) {
  constexpr const char* kWayOut =
      "Set zero.offload_folder to a folder that may be written, on a disk.";
  std::error_code error;
  const bool is_folder = std::filesystem::is_directory(folder, error);
  TS_CHECK_CONFIG(is_folder, "zero.offload_folder: ", folder, ": ",
                  error ? error.message() : "it is no folder", ". ", kWayOut);
  TS_CHECK_CONFIG(::access(folder.c_str(), W_OK | X_OK) == 0,
                  "zero.offload_folder: ", folder, ": ", std::strerror(errno),
                  ". ", kWayOut);
  TS_CHECK_CONFIG(!lies_in_memory(folder), "zero.offload is ",
                  config.zero.offload, ", but ", folder,
                  " is on a file system that lies in memory: states would "
                  "leave it for itself. ",
                  kWayOut);
}

void check_offload(const RunConfig& config, int64_t needed) {
  const std::string folder = engine::offload_folder(config);
  check_offload_folder(config, folder);
  const uint64_t room = free_bytes(folder);
  TS_CHECK_CONFIG(
      static_cast<uint64_t>(needed) <= room, "zero.offload: ", folder, " has ",
      bytes_text(room), " free, but the states of this host's ranks need ",
      bytes_text(needed),
      ". Free some, set zero.offload_folder to a folder on another "
      "disk, or zero.offload to ",
      config.zero.offloads_parameters() ? "optimizer or none" : "none", ".");
}

// The ranks of a host that read the data.
std::vector<int64_t> readers_on(const RunConfig& config,
                                const HostRanks& ranks) {
  std::vector<int64_t> readers;
  for (int64_t i = 0; i < ranks.count; ++i) {
    const int64_t rank = ranks.first + i;
    if (engine::reader_of(config, rank) == rank) readers.push_back(rank);
  }
  return readers;
}

void check_data_paths(const RunConfig& config) {
  const data::DataConfig& data = config.data;
  data::expand_paths(data.train, "data.train", data.exclude);
  if (!data.valid.empty()) {
    data::expand_paths(data.valid, "data.valid", data.exclude);
  }
}

// Who looks for the files, where others do not: on which host, and for whom.
void check_data_of(const RunConfig& config, const HostRanks& ranks) {
  const auto readers = readers_on(config, ranks);
  if (readers.empty()) return;
  if (!engine::reads_for_others(config)) return check_data_paths(config);
  const std::string complaint =
      comm::complaint_of([&] { check_data_paths(config); });
  TS_CHECK_CONFIG(
      complaint.empty(), "data.reader is first, and rank ", readers.front(),
      " on ", host_name(),
      " reads for the ranks that train on its samples: ", complaint,
      " Put the files there too, or start the ranks so that the first one of "
      "each group is on a host that has them; mesh.order says which ranks are "
      "a group.");
}

// What needs the run's folder.
void check_and_prepare(const RunConfig& config, const HostRanks& ranks,
                       const RunFolder& folder, const std::string& resume) {
  const bool offloads = config.zero.offloads();
  const int64_t in_files =
      offloads ? bytes_together(config, ranks, engine::memory_plans(config),
                                &engine::MemoryPlan::in_files)
               : 0;
  if (offloads) check_offload(config, in_files);
  if (config.checkpoint.saves()) {
    const bool share = offloads && on_one_disk(folder.checkpoints(),
                                               engine::offload_folder(config));
    checkpoint::require_space(folder.checkpoints(), checkpoint_bytes(config),
                              config.checkpoint, share ? in_files : 0);
  }
  check_memory(config, ranks, memory_of_host());
  check_choices();
  if (readers_on(config, ranks).empty()) return;
  check_samples(config, prepare_data(config, folder, resume));
}

void check_other_paths(const RunConfig& config) {
  comm::check_tuning_table();
  check_first_weights(config);
}

// A run that is refused leaves no folder that looks like one.
void remove_made(const std::vector<std::string>& paths) {
  for (const std::string& path : paths | std::views::reverse) {
    std::error_code error;  // a folder that is not empty stays
    std::filesystem::remove(path, error);
  }
}

}  // namespace

void preflight(const RunConfig& config, const HostRanks& ranks,
               const std::string& resume) {
  check_data_of(config, ranks);
  check_other_paths(config);
  const RunFolder folder(config);
  check_resume(resume, folder.checkpoints());
  check_resumed(config, resume, folder.checkpoints());
  const auto made = folder.missing();
  try {
    folder.create();
    check_and_prepare(config, ranks, folder, resume);
  } catch (...) {
    remove_made(made);
    throw;
  }
}

void check_memory(const RunConfig& of, const HostRanks& ranks,
                  int64_t host_bytes, program::Purpose purpose) {
  // Devices have memory of their own.
  const bool needs_host =
      of.checkpoint.async || std::ranges::count(of.run.device_types, at::kCPU);
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
                          program::Purpose purpose) {
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
  TS_CHECK_CONFIG(
      false, out_of_memory_text(error), " This rank held ",
      held(MemoryKind::kParameters), " of parameters", beside_parameters,
      ", and up to ", held(MemoryKind::kWork), " beside them. Use ",
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

void check_paths(const RunConfig& config) {
  check_data_paths(config);
  check_other_paths(config);
}

std::string describe_plan(const RunConfig& config) {
  check_choices();
  const auto& zero = config.zero;
  if (zero.offloads() && !zero.offload_folder.empty()) {
    check_offload_folder(config, zero.offload_folder);
  }
  const auto mesh = mesh_of(config, implied_world_size(config));
  RunConfig here = config;  // all ranks on this host
  here.resolve(share_memory(config, {.first = 0, .count = mesh.world_size()}));
  const auto memory = engine::memory_plan(here);
  std::string stages;
  if (config.mesh.pp > 1) {
    stages = "stages      " + engine::split_text(config) + "\n";
  }
  const std::string seen = engine::seen_text(config);
  if (!seen.empty()) stages += "            " + seen + "\n";
  std::ostringstream text;
  text << "model       " << models::describe(config.model) << "\n"
       << "mesh        " << mesh.describe() << "\n"
       << groups_text(config, mesh) << stages << "batch       "
       << batch_text(config) << "; "
       << count_text(config.batch.global * config.data.seq_len)
       << " tokens a step\n"
       << shares_line(config) << "memory      " << bytes_text(memory.states)
       << " of model states and at most " << bytes_text(memory.work)
       << " of activations on the fullest rank\n";
  if (memory.in_files > 0) {
    text << "files       " << bytes_text(memory.in_files)
         << " of its states lie in " << engine::offload_folder(config) << "\n";
  }
  text << "checkpoint  " << bytes_text(checkpoint_bytes(config));
  if (memory.copies > 0) {
    text << ", of which the fullest rank copies at most "
         << bytes_text(memory.copies) << " into memory";
  }
  text << "\n";
  return text.str();
}

}  // namespace tessera::train
