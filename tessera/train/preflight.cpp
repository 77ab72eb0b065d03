#include "tessera/train/preflight.h"

#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <ranges>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/local_place.h"
#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/host.h"
#include "tessera/core/units.h"
#include "tessera/core/vectors.h"
#include "tessera/data/chat_template.h"
#include "tessera/data/file_list.h"
#include "tessera/data/tokenizer.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/reader.h"
#include "tessera/engine/step_programs.h"
#include "tessera/nn/kernel_choice.h"
#include "tessera/train/data_setup.h"
#include "tessera/train/plan_text.h"
#include "tessera/train/resumed_run.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/state.h"
#include "tessera/train/text_samples.h"
#include "tessera/train/trained_model.h"

namespace tessera::train {

using engine::RunConfig;

namespace {

// What the environment names must be there.
void check_choices(const RunConfig& config) {
  engine::check_passes(config, engine::passes_chosen());
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

// At most: at every so many steps, and at the last one; the best as often as
// there is one.
int64_t saves_of(const RunConfig& config) {
  if (config.checkpoint.keep_best) return std::numeric_limits<int64_t>::max();
  const int64_t every = config.checkpoint.every;
  return 1 + (every > 0 ? (config.run.steps - 1) / every : 0);
}

// What needs the run's folder.
void check_and_prepare(const RunConfig& config, const HostRanks& ranks,
                       const RunFolder& folder, const std::string& resume) {
  const bool offloads = config.zero.offloads();
  const int64_t in_files = offloads ? bytes_in_files(config, ranks) : 0;
  if (offloads) check_offload(config, in_files);
  if (config.checkpoint.saves()) {
    const bool share = offloads && on_one_disk(folder.checkpoints(),
                                               engine::offload_folder(config));
    checkpoint::require_space(folder.checkpoints(), checkpoint_bytes(config),
                              config.checkpoint, share ? in_files : 0,
                              saves_of(config));
  }
  if (config.checkpoint.saves_locally()) {
    checkpoint::require_local_space(folder.local(),
                                    local_checkpoint_bytes(config, ranks));
  }
  check_memory(config, ranks, memory_of_host());
  check_choices(config);
  if (readers_on(config, ranks).empty()) return;
  check_samples(config, prepare_data(config, folder, resume));
}

void check_other_paths(const RunConfig& config) {
  comm::check_tuning_table();
  check_first_weights(config);
  RunFolder(config).check();
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

void check_paths(const RunConfig& config) {
  check_data_paths(config);
  check_other_paths(config);
  const auto& data = config.data;
  if (!data.tokenizer.empty()) data::Tokenizer::load(data.tokenizer);
  if (!data.chat_template.empty() && data.chat_template != "none") {
    data::ChatTemplate::read(data.chat_template, data.tokenizer);
  }
}

std::string describe_plan(const RunConfig& config) {
  check_choices(config);
  const auto& zero = config.zero;
  if (zero.offloads() && !zero.offload_folder.empty()) {
    check_offload_folder(config, zero.offload_folder);
  }
  return plan_text(config);
}

}  // namespace tessera::train
