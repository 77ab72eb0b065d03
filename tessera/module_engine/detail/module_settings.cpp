#include "tessera/module_engine/detail/module_settings.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "tessera/core/config_places.h"
#include "tessera/core/error.h"
#include "tessera/engine/deepspeed.h"
#include "tessera/engine/idle_keys.h"
#include "tessera/engine/update_config.h"
#include "tessera/wrappers/moe.h"

namespace tessera::detail {
namespace {

using config::Provenance;

// Keys that a module of one's own has no use for, and why.
struct Idle {
  std::string_view key;
  const char* why;
};
constexpr std::array kIdle = {
    Idle{"batch.uneven", "each rank's loop takes what samples it takes"},
    Idle{"zero.bucket_mb", "the gradients of a unit are reduced as one"},
    Idle{"precision.products", "the module's code says what it multiplies"},
    Idle{"recompute.mode", "the module's code says what it computes again"},
    Idle{"monitor.every", "the loop is the user's, who prints what he likes"},
    Idle{"monitor.tensorboard", "no run folder is written"},
};

// Sections that are of the trainer alone.
constexpr std::array kSectionsOfRuns = {"data", "validate", "checkpoint"};

// A file that is one line, or a path to it.
engine::DeepSpeed read(const std::string& json) {
  const auto first = json.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && json[first] == '{') {
    return {json, "the JSON"};
  }
  return engine::DeepSpeed(json);
}

void refuse_what_cuts_models(const mesh::MeshConfig& mesh,
                             const Provenance& origins) {
  for (const auto& [axis, instead] :
       {std::pair(mesh::Axis::kPp, "its stages are not known"),
        std::pair(mesh::Axis::kTp,
                  "parallelize() and fully_shard() on a mesh with tp do that"),
        std::pair(mesh::Axis::kCp, "its attention is its own")}) {
    const std::string key = std::string("mesh.") + mesh::name_of(axis);
    TS_CHECK_CONFIG(mesh.degree(axis) == 1, "initialize: ", key, " is ",
                    mesh.degree(axis), " (", origins.at(key),
                    "): a module of one's own is shared out over ranks that "
                    "see other data alone: ",
                    instead, ".");
  }
}

void refuse_files(const std::string& offload, const Provenance& origins) {
  TS_CHECK_CONFIG(offload == "none", "initialize: zero.offload is ", offload,
                  " (", origins.at("zero.offload"),
                  "): states in files are of 'tessera train', whose program "
                  "says when they are used. Use device cpu or none, or leave "
                  "zero.offload out.");
}

std::vector<std::string> warnings_of(const engine::DeepSpeed& file,
                                     const engine::RunConfig& config,
                                     const InitializeOptions& options,
                                     const Provenance& origins) {
  std::vector<std::string> found;
  if (const auto idle = file.without_effect(); !idle.empty()) {
    found.push_back(idle);
  }
  for (const auto& [key, why] : kIdle) {
    const std::string name(key);
    if (!config::is_set(origins, name)) continue;
    found.push_back(origins.at(name) +
                    " has no effect on a module of one's own: " + why + ".");
  }
  Provenance of_models = origins;
  of_models.erase("zero.expert_stage");  // check_experts() knows the module
  for (const auto& idle : engine::without_effect(config, of_models)) {
    found.push_back("initialize: " + idle + ".");
  }
  for (const auto& [key, value] : options.settings) {
    const std::string section = key.substr(0, key.find('.'));
    if (std::ranges::find(kSectionsOfRuns, section) == kSectionsOfRuns.end()) {
      continue;
    }
    found.push_back("settings: " + key +
                    " has no effect on a module of one's own: " + section +
                    " is a section of 'tessera train'.");
  }
  return found;
}

// What the file says beside the user's settings, for so many ranks.
void settle(engine::DeepSpeed& file, int64_t world_size, Provenance& origins,
            ModuleSettings& found) {
  engine::RunConfig& config = found.config;
  file.apply(config, origins);
  refuse_what_cuts_models(config.mesh, origins);
  refuse_files(config.zero.offload, origins);
  // As DeepSpeed, which shards the masters without being asked.
  if (c10::isReducedFloatingType(config.precision.compute_dtype())) {
    config.zero.stage = std::max<int64_t>(1, config.zero.stage);
    if (config.zero.expert_stage == 0) config.zero.expert_stage = 1;
  }
  found.mesh = engine::mesh_of(config, world_size);
  file.apply_batch(config, world_size, origins);
  TS_CHECK_CONFIG(config::is_set(origins, "batch.global"),
                  "initialize: the batch is not known: give train_batch_size, "
                  "or train_micro_batch_size_per_gpu.");
  config.optimizer.complete();
  config.precision.complete();
  config.precision.check();
  engine::check_schedule(config);
  engine::ask_for_whole_matrices(config);
  const int64_t data = found.mesh.degree(mesh::Axis::kDpReplicate) *
                       found.mesh.degree(mesh::Axis::kDpShard);
  found.accumulation = config.batch.global / (config.batch.micro * data);
}

}  // namespace

ModuleSettings module_settings(const std::string& json, int64_t world_size,
                               const InitializeOptions& options) {
  ModuleSettings found;
  engine::RunConfig& config = found.config;
  std::vector<config::Override> settings;
  for (const auto& [key, value] : options.settings) {
    settings.push_back({key, value, "settings: " + key});
  }
  Provenance origins;
  config = engine::read_run_config("", settings, &origins);
  engine::DeepSpeed file = read(json);
  try {
    settle(file, world_size, origins, found);
  } catch (const Error& error) {
    throw Error(error.exit_code(),
                config::with_places(message_of(error), origins));
  }
  config::Section root;
  config.declare(root);
  found.text = config::print(root, origins);
  found.notes = file.left_open(config);
  found.warnings = warnings_of(file, config, options, origins);
  found.has_experts = config::is_set(origins, "model.moe.experts");
  return found;
}

void check_experts(torch::nn::Module& module, const ModuleSettings& settings) {
  const auto& wanted = settings.config.model.moe;
  const auto mixtures = wrappers::mixtures_of(module);
  for (const auto& [name, moe] : mixtures) {
    TS_CHECK_CONFIG(
        !settings.has_experts ||
            (moe->experts() == wanted.experts && moe->k() == wanted.top_k),
        "initialize: the MoE \"", name, "\" has ", moe->experts(),
        " experts and k ", moe->k(), ", but moe.num_experts is ",
        wanted.experts, " and moe.k ", wanted.top_k, ". Give both the same.");
  }
  TS_CHECK_CONFIG(!mixtures.empty() || settings.config.zero.expert_stage < 0,
                  "initialize: zero.expert_stage is ",
                  settings.config.zero.expert_stage,
                  ", but the module has no tessera::MoE. Leave it out.");
  TS_CHECK_CONFIG(!mixtures.empty() || !settings.has_experts,
                  "initialize: moe is enabled, but the module has no "
                  "tessera::MoE. Build one on mesh_of() the file, or leave moe "
                  "out.");
}

}  // namespace tessera::detail
