#include "tessera/engine/idle_keys.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "tessera/core/detail/json.h"
#include "tessera/engine/cut_text.h"
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

// One function a section, or what belongs together in it.
class IdleKeys {
 public:
  IdleKeys(const RunConfig& config, const config::Provenance& origins)
      : config_(config),
        origins_(origins),
        values_(tessera::detail::parse_json(to_json(config), "")),
        defaults_(tessera::detail::parse_json(to_json(RunConfig()), "")) {}

  std::vector<std::string> find() {
    optimizer();
    precision();
    schedule();
    data();
    pipeline();
    validation();
    spikes();
    monitor();
    adapters();
    offload_and_recompute();
    positions();
    experts();
    note(config_.model.mtp.layers == 0, {"model.mtp.weight"},
         "is not used while model.mtp.layers is 0");
    return std::move(found_);
  }

 private:
  // A default that is written out, as a run's own config.json has them, wants
  // nothing.
  bool is_asked_for(const std::string& key) const {
    using tessera::detail::value_at;
    return config::is_set(origins_, key) &&
           value_at(values_, key) != value_at(defaults_, key);
  }

  void note(bool idle, const std::vector<std::string>& keys,
            const std::string& why) {
    for (const std::string& key : keys) {
      if (idle && is_asked_for(key)) found_.push_back(key + " " + why);
    }
  }

  void optimizer() {
    const auto& of = config_.optimizer;
    const auto& rule = optim::update_rule(of.type);
    const std::string why = "is not used by optimizer.type " + rule.name;
    for (const std::string key : {"betas", "eps", "momentum"}) {
      note(!rule.uses(key), {"optimizer." + key}, why);
    }
    std::ranges::copy(betas_without_effect(config_),
                      std::back_inserter(found_));
    note(!config_.whole_matrices,
         {"optimizer.muon.momentum", "optimizer.muon.nesterov",
          "optimizer.muon.steps", "optimizer.muon.eps",
          "optimizer.muon.adjust_lr", "optimizer.muon.dtype",
          "optimizer.muon.adamw_lr"},
         why);
    note(of.normalize_grad && of.clip_norm >= 1, {"optimizer.clip_norm"},
         "has nothing to do: optimizer.normalize_grad gives every gradient the "
         "norm 1");
  }

  void precision() {
    note(config_.precision.loss_scale != 0,
         {"precision.initial_loss_scale", "precision.scale_growth_interval",
          "precision.scale_hysteresis", "precision.consecutive_hysteresis",
          "precision.min_loss_scale"},
         "is not used unless precision.loss_scale is 0");
  }

  void schedule() {
    const auto& of = config_.schedule;
    note(of.warmup == 0 && of.convention == "tessera",
         {"schedule.warmup_type", "schedule.start_lr"},
         "is not used while schedule.warmup is 0");
    note(of.type == "constant", {"schedule.min_lr", "schedule.steps"},
         "is not used by schedule.type constant");
    note(of.type != "wsd", {"schedule.decay"},
         "is not used by schedule.type " + of.type);
  }

  void data() {
    note(config_.mesh.star(), {"data.reader"},
         "is not used by mesh.data_parallel dp, which is one rank");
    note(!config_.mesh.star() && config_.mesh.ranks_of_model() == 1,
         {"data.reader"},
         "changes nothing where mesh.pp, cp and tp are 1: every rank trains on "
         "samples of its own");
  }

  void pipeline() {
    note(config_.pipeline.schedule != "gpipe", {"pipeline.order"},
         "is not used by pipeline.schedule " + config_.pipeline.schedule);
    std::ranges::copy(idle_cuts(config_), std::back_inserter(found_));
  }

  void validation() {
    note(config_.data.valid.empty() && config_.data.valid_share == 0,
         {"validate.every", "validate.samples", "validate.at_start",
          "validate.patience", "validate.ema", "checkpoint.keep_best"},
         "is not used without data.valid or data.valid_share");
    note(!config_.checkpoint.saves(), {"checkpoint.async"},
         "is not used while checkpoint.every is 0");
    const auto& checkpoint = config_.checkpoint;
    note(!checkpoint.saves_locally(), {"checkpoint.local_dir"},
         "is not used while checkpoint.local_every is 0");
    note(checkpoint.saves_locally() && checkpoint.every > 0 &&
             !checkpoint.async &&
             checkpoint.local_every % checkpoint.every == 0,
         {"checkpoint.local_every"},
         "is not used: at each of these steps checkpoint.every has one due");
  }

  void spikes() {
    const auto& of = config_.spike;
    note(!of.rewinds(),
         {"spike.skip_before", "spike.skip_after", "spike.max_rewinds"},
         "is not used by spike.action " + of.action);
    note(of.action != "none" && of.window >= config_.run.steps,
         {"spike.window", "spike.deviations"},
         "is not used in " + std::to_string(config_.run.steps) +
             " steps: a loss is compared with a whole window before it");
    note(of.action == "none", {"spike.window", "spike.deviations"},
         "is not used by spike.action none");
  }

  void monitor() {
    note(config_.mesh.star() || implied_world_size(config_) == 1,
         {"monitor.by_rank"}, "is not used by one rank");
    note(config_.monitor.reruns > config_.run.steps, {"monitor.reruns"},
         "is not used in " + std::to_string(config_.run.steps) + " steps");
    note(config_.monitor.sample == 0,
         {"monitor.sample_prompt", "monitor.sample_tokens",
          "monitor.sample_temperature"},
         "is not used while monitor.sample is 0: no text is written");
  }

  void adapters() {
    const auto& model = config_.model;
    note(model.lora.rank == 0, {"model.lora.alpha", "model.lora.targets"},
         "is not used while model.lora.rank is 0: all weights are trained");
    note(model.lora.rank > 0 && !model.load_weights, {"model.lora.rank"},
         "freezes weights that are random: model.load_weights is false");
  }

  void offload_and_recompute() {
    note(!config_.zero.offloads(), {"zero.offload_folder"},
         "is not used while zero.offload is none");
    const auto& of = config_.recompute;
    note(of.mode != "block" && of.mode != "stage", {"recompute.every"},
         "is not used by recompute.mode " + of.mode);
    note(of.mode == "stage" && of.every >= config_.model.num_blocks(),
         {"recompute.every"}, "is no less than a stage has blocks, as 0 is");
  }

  void positions() {
    const auto& model = config_.model;
    note(models::family_named(model.family).learned_positions,
         {"model.rope_theta", "model.rope_scaling.type"},
         "is not used by model.family " + model.family +
             ", whose positions are learned");
    note(model.window == 0, {"model.window_every", "model.window_first_full"},
         "is not used while model.window is 0: all layers see all");
    const std::string& scaling = model.rope_scaling.type;
    static const std::map<std::string, std::set<std::string>> kUsedBy = {
        {"factor", {"linear", "llama3", "yarn"}},
        {"original_max_seq", {"llama3", "yarn"}},
        {"low_freq_factor", {"llama3"}},
        {"high_freq_factor", {"llama3"}},
        {"beta_fast", {"yarn"}},
        {"beta_slow", {"yarn"}},
        {"truncate", {"yarn"}},
        {"attention_factor", {"yarn"}},
        {"mscale", {"yarn"}}};
    for (const auto& [key, types] : kUsedBy) {
      note(!types.contains(scaling), {"model.rope_scaling." + key},
           "is not used by model.rope_scaling.type " + scaling);
    }
  }

  void experts() {
    const auto& moe = config_.model.moe;
    note(moe.experts == 0,
         {"model.moe.top_k",          "model.moe.every",
          "model.moe.first_dense",    "model.moe.ffn",
          "model.moe.score",          "model.moe.normalize",
          "model.moe.scale",          "model.moe.groups",
          "model.moe.top_groups",     "model.moe.capacity_factor",
          "model.moe.shared_experts", "model.moe.choice",
          "model.moe.noise",          "model.moe.balance",
          "model.moe.aux_loss",       "model.moe.z_loss",
          "model.moe.bias_balance",   "model.moe.bias_rate",
          "zero.expert_stage",        "mesh.etp"},
         "is not used by a model without experts");
    note(config_.mesh.ep == 1, {"expert.dispatch_chunks"},
         "is not used while mesh.ep is 1: tokens stay where their experts are");
    const std::string idle = idle_expert_shard(config_);
    note(!idle.empty(), {"zero.expert_shard"}, idle);
    note(moe.aux_loss == 0, {"model.moe.balance"},
         "is not used while model.moe.aux_loss is 0");
    note(moe.experts_choose(),
         {"model.moe.aux_loss", "model.moe.balance", "model.moe.normalize"},
         "is not used by model.moe.choice experts");
    note(config_.model.lora.rank > 0,
         {"model.moe.bias_balance", "model.moe.bias_rate"},
         "moves nothing beside adapters, which alone are trained");
    note(!moe.bias_balance, {"model.moe.bias_rate"},
         "is not used while model.moe.bias_balance is false");
  }

  const RunConfig& config_;
  const config::Provenance& origins_;
  const tessera::detail::Json values_, defaults_;
  std::vector<std::string> found_;
};

}  // namespace

std::vector<std::string> without_effect(const RunConfig& config,
                                        const config::Provenance& origins) {
  return IdleKeys(config, origins).find();
}

}  // namespace tessera::engine
