#include "tessera/engine/idle_keys.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

#include "tessera/core/detail/json.h"
#include "tessera/engine/model_cut.h"
#include "tessera/engine/update_config.h"
#include "tessera/models/family.h"
#include "tessera/optim/registry.h"

namespace tessera::engine {
namespace {

// Why zero.expert_shard changes nothing; "" where it does.
std::string idle_expert_shard(const RunConfig& config) {
  if (config.model.moe.experts == 0) {
    return "is not used by a model without experts";
  }
  if (config.zero.stage_of_experts() == 0) {
    return "is not used while zero.expert_stage is 0: experts are not sharded";
  }
  return config.mesh.dp_replicate > 1
             ? ""
             : "changes nothing where mesh.dp_replicate is 1: there is one "
               "replica";
}

}  // namespace

std::vector<std::string> without_effect(const RunConfig& config,
                                        const config::Provenance& origins) {
  std::vector<std::string> found;
  const auto values = tessera::detail::parse_json(to_json(config), "");
  const auto defaults = tessera::detail::parse_json(to_json(RunConfig()), "");
  // A default that is written out, as a run's own config.json has them, wants
  // nothing.
  const auto is_asked_for = [&](const std::string& key) {
    tessera::detail::Json::json_pointer at;
    std::istringstream parts(key);
    for (std::string part; std::getline(parts, part, '.');) at /= part;
    return config::is_set(origins, key) && values.at(at) != defaults.at(at);
  };
  const auto note = [&](bool idle, const std::string& key,
                        const std::string& why) {
    if (idle && is_asked_for(key)) found.push_back(key + " " + why);
  };
  const auto& optimizer = optim::update_rule(config.optimizer.type);
  for (const std::string key : {"betas", "eps", "momentum"}) {
    note(!optimizer.uses(key), "optimizer." + key,
         "is not used by optimizer.type " + optimizer.name);
  }
  std::ranges::copy(betas_without_effect(config), std::back_inserter(found));
  for (const std::string key : {"momentum", "nesterov", "steps", "eps",
                                "adjust_lr", "dtype", "adamw_lr"}) {
    note(!config.whole_matrices, "optimizer.muon." + key,
         "is not used by optimizer.type " + optimizer.name);
  }
  note(config.optimizer.normalize_grad && config.optimizer.clip_norm >= 1,
       "optimizer.clip_norm",
       "has nothing to do: optimizer.normalize_grad gives every gradient the "
       "norm 1");
  for (const char* key :
       {"precision.initial_loss_scale", "precision.scale_growth_interval",
        "precision.scale_hysteresis", "precision.consecutive_hysteresis",
        "precision.min_loss_scale"}) {
    note(config.precision.loss_scale != 0, key,
         "is not used unless precision.loss_scale is 0");
  }
  for (const char* key : {"schedule.warmup_type", "schedule.start_lr"}) {
    note(config.schedule.warmup == 0 && config.schedule.convention == "tessera",
         key, "is not used while schedule.warmup is 0");
  }
  note(config.mesh.star(), "data.reader",
       "is not used by mesh.data_parallel dp, which is one rank");
  note(!config.mesh.star() && config.mesh.ranks_of_model() == 1, "data.reader",
       "changes nothing where mesh.pp, cp and tp are 1: every rank trains on "
       "samples of its own");
  note(config.pipeline.schedule != "gpipe", "pipeline.order",
       "is not used by pipeline.schedule " + config.pipeline.schedule);
  std::ranges::copy(idle_cuts(config), std::back_inserter(found));
  note(config.schedule.type == "constant", "schedule.min_lr",
       "is not used by schedule.type constant");
  note(config.schedule.type != "wsd", "schedule.decay",
       "is not used by schedule.type " + config.schedule.type);
  note(config.schedule.type == "constant", "schedule.steps",
       "is not used by schedule.type constant");
  const bool validates =
      !config.data.valid.empty() || config.data.valid_share > 0;
  for (const char* key :
       {"validate.every", "validate.samples", "validate.at_start",
        "validate.patience", "validate.ema", "checkpoint.keep_best"}) {
    note(!validates, key, "is not used without data.valid or data.valid_share");
  }
  note(!config.checkpoint.saves(), "checkpoint.async",
       "is not used while checkpoint.every is 0");
  for (const char* key : {"monitor.sample_prompt", "monitor.sample_tokens",
                          "monitor.sample_temperature"}) {
    note(config.monitor.sample == 0, key,
         "is not used while monitor.sample is 0: no text is written");
  }
  for (const char* key : {"model.lora.alpha", "model.lora.targets"}) {
    note(config.model.lora.rank == 0, key,
         "is not used while model.lora.rank is 0: all weights are trained");
  }
  note(config.model.lora.rank > 0 && !config.model.load_weights,
       "model.lora.rank",
       "freezes weights that are random: model.load_weights is false");
  note(!config.zero.offloads(), "zero.offload_folder",
       "is not used while zero.offload is none");
  const std::string& mode = config.recompute.mode;
  note(mode != "block" && mode != "stage", "recompute.every",
       "is not used by recompute.mode " + mode);
  note(mode == "stage" && config.recompute.every >= config.model.num_blocks(),
       "recompute.every", "is no less than a stage has blocks, as 0 is");
  const auto& family = models::family_named(config.model.family);
  for (const char* key : {"model.rope_theta", "model.rope_scaling.type"}) {
    note(family.learned_positions, key,
         "is not used by model.family " + config.model.family +
             ", whose positions are learned");
  }
  for (const char* key : {"model.window_every", "model.window_first_full"}) {
    note(config.model.window == 0, key,
         "is not used while model.window is 0: all layers see all");
  }
  const std::string& scaling = config.model.rope_scaling.type;
  for (const auto& [key, types] : std::map<std::string, std::set<std::string>>{
           {"factor", {"linear", "llama3", "yarn"}},
           {"original_max_seq", {"llama3", "yarn"}},
           {"low_freq_factor", {"llama3"}},
           {"high_freq_factor", {"llama3"}},
           {"beta_fast", {"yarn"}},
           {"beta_slow", {"yarn"}},
           {"truncate", {"yarn"}},
           {"attention_factor", {"yarn"}},
           {"mscale", {"yarn"}}}) {
    note(!types.contains(scaling), "model.rope_scaling." + key,
         "is not used by model.rope_scaling.type " + scaling);
  }
  for (const char* key :
       {"model.moe.top_k",          "model.moe.every",
        "model.moe.first_dense",    "model.moe.ffn",
        "model.moe.score",          "model.moe.normalize",
        "model.moe.scale",          "model.moe.groups",
        "model.moe.top_groups",     "model.moe.capacity_factor",
        "model.moe.shared_experts", "model.moe.choice",
        "model.moe.noise",          "model.moe.balance",
        "model.moe.aux_loss",       "model.moe.z_loss",
        "model.moe.bias_balance",   "model.moe.bias_rate",
        "zero.expert_stage",        "mesh.etp"}) {
    note(config.model.moe.experts == 0, key,
         "is not used by a model without experts");
  }
  note(config.mesh.ep == 1, "expert.dispatch_chunks",
       "is not used while mesh.ep is 1: tokens stay where their experts are");
  const std::string idle = idle_expert_shard(config);
  note(!idle.empty(), "zero.expert_shard", idle);
  note(config.model.moe.aux_loss == 0, "model.moe.balance",
       "is not used while model.moe.aux_loss is 0");
  for (const char* key :
       {"model.moe.aux_loss", "model.moe.balance", "model.moe.normalize"}) {
    note(config.model.moe.experts_choose(), key,
         "is not used by model.moe.choice experts");
  }
  note(config.model.mtp.layers == 0, "model.mtp.weight",
       "is not used while model.mtp.layers is 0");
  note(!config.model.moe.bias_balance, "model.moe.bias_rate",
       "is not used while model.moe.bias_balance is false");
  return found;
}

}  // namespace tessera::engine
