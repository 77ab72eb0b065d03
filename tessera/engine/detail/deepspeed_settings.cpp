#include "tessera/engine/detail/deepspeed_settings.h"

#include <algorithm>
#include <cmath>

#include "tessera/core/error.h"

namespace tessera::engine::detail {
namespace {

constexpr double kLr = 1e-3;  // of DeepSpeed's optimizers, and warmup_max_lr
constexpr double kLrOfMuon = 0.02, kLrBesideMuon = 3e-4;  // MuonWithAuxAdam's

class Translation {
 public:
  explicit Translation(const DeepSpeedValues& values) : values_(values) {}

  DeepSpeedSettings all() {
    for (const auto& value : values_.all()) {
      if (value.key->effect == DeepSpeedEffect::kBecomes) {
        set(std::string(value.key->to), value.value, value.origin);
      }
    }
    add_optimizer();
    add_scheduler();
    add_precision();
    add_offload();
    add_mesh();
    if_open("gradient_clipping", "optimizer.clip_norm", 0.0);
    return std::move(found_);
  }

 private:
  void set(const std::string& key, Json value, const std::string& origin) {
    found_.settings.push_back({key, std::move(value), origin});
  }
  // What DeepSpeed has where its file does not say.
  void set_default(const std::string& key, Json value,
                   const std::string& name) {
    found_.settings.push_back(
        {.key = key,
         .value = std::move(value),
         .origin = values_.source() + ": DeepSpeed's default of " + name,
         .yields = true,
         .is_default = true});
  }
  void if_open(const std::string& name, const std::string& key, Json value) {
    if (values_.is_open(name)) set_default(key, std::move(value), name);
  }
  void given_or(const std::string& name, const std::string& key, Json value) {
    if (const auto* given = values_.find(name)) {
      set(key, given->value, given->origin);
    } else {
      if_open(name, key, std::move(value));
    }
  }

  // The choice of a section's type; "": none, or "auto".
  std::string type_of(const std::string& section) const {
    const std::string name = section + ".type";
    TS_CHECK_CONFIG(!values_.has_section(section) || !values_.is_open(name),
                    values_.source(), ": ", section, " has no type. Add ", name,
                    ": one of ", deepspeed_key(name)->choices, ".");
    const auto* given = values_.find(name);
    return given
               ? choice_of(given->value.get<std::string>(), given->key->choices)
               : "";
  }

  void add_optimizer() {
    const std::string type = type_of("optimizer");
    if (type.empty()) return;
    const std::string params = "optimizer.params.";
    const auto* mode = values_.find(params + "adam_w_mode");
    const bool l2 = type == "Adam" && mode && mode->value == false;
    const bool adamw = type == "AdamW" || (type == "Adam" && !l2);
    set("optimizer.type",
        adamw            ? "adamw"
        : type == "Adam" ? "adam"
        : type == "SGD"  ? "sgd"
        : type == "Lion" ? "lion"
                         : "muon",
        l2 ? mode->origin : values_.find("optimizer.type")->origin);
    if (!adamw && mode && !l2) {
      found_.without_effect.emplace_back(params + "adam_w_mode",
                                         "it is of Adam");
    }
    const bool torchs = adamw && values_.is_true(params + "torch_adam");
    if (type != "Muon") refuse_params_of_muon();
    if (type != "Muon" && type != "SGD" && values_.find(params + "momentum")) {
      found_.without_effect.emplace_back(params + "momentum",
                                         "it is of SGD and Muon");
    }
    if_open(params + "weight_decay", "optimizer.weight_decay",
            torchs ? 0.01 : 0.0);
    if (adamw || l2) {
      if_open(params + "betas", "optimizer.betas", Json::array({0.9, 0.999}));
      if_open(params + "eps", "optimizer.eps", 1e-8);
    } else if (type == "Muon") {
      add_muon();
    } else if (type == "Lion") {
      if_open(params + "betas", "optimizer.betas", Json::array({0.9, 0.99}));
    } else {
      given_or(params + "momentum", "optimizer.momentum", 0.0);
    }
  }

  // The numbers of its AdamW are those of DeepSpeed's MuonWithAuxAdam.
  void add_muon() {
    const std::string params = "optimizer.params.";
    if_open(params + "betas", "optimizer.betas", Json::array({0.9, 0.95}));
    if_open(params + "eps", "optimizer.eps", 1e-10);
    if (const auto* momentum = values_.find(params + "momentum")) {
      set("optimizer.muon.momentum", momentum->value, momentum->origin);
    }
    // Warm-ups to a rate of their own set all rates alike.
    const std::string schedule = type_of("scheduler");
    const std::string warmup = "scheduler.params.warmup_";
    const bool has_max = values_.find(warmup + "max_lr") != nullptr ||
                         values_.is_auto(warmup + "max_lr");
    const bool scales = schedule.empty() || schedule == "WarmupCosineLR" ||
                        (schedule == "WarmupLR" && !has_max);
    if (scales) add_rate_beside_muon();
    for (const char* rate : {"muon_lr", "adam_lr"}) {
      if (scales || values_.find(params + rate) == nullptr) continue;
      found_.without_effect.emplace_back(params + rate,
                                         schedule + " sets all rates");
    }
  }

  // Each of the two groups takes its own rate, else lr, else its own default.
  void add_rate_beside_muon() {
    const std::string params = "optimizer.params.";
    const std::string key = "optimizer.muon.adamw_lr";
    const auto* own = values_.find(params + "adam_lr");
    const auto* of_both = values_.find(params + "lr");
    const auto* muon = values_.find(params + "muon_lr");
    if (own != nullptr) {
      set(key, own->value, own->origin);
    } else if (of_both != nullptr && muon != nullptr) {
      found_.settings.push_back({.key = key,
                                 .value = of_both->value,
                                 .origin = of_both->origin,
                                 .yields = true});
    } else if (of_both == nullptr && !values_.is_auto(params + "lr")) {
      if_open(params + "adam_lr", key, kLrBesideMuon);
    }
    const auto* min = values_.find("scheduler.params.warmup_min_lr");
    const bool is_one_rate =
        of_both != nullptr && own == nullptr && muon == nullptr;
    TS_CHECK_CONFIG(!min || min->value == Json(0.0) || is_one_rate, min->origin,
                    ": Muon's two rates would warm up from it each in its own "
                    "way. Leave it out, or give warmup_max_lr.");
  }

  void refuse_params_of_muon() const {
    for (const char* rate : {"muon_lr", "adam_lr"}) {
      const auto* given = values_.find(std::string("optimizer.params.") + rate);
      TS_CHECK_CONFIG(!given, given->origin,
                      " is of Muon. Use optimizer.params.lr.");
    }
  }

  // Of the optimizer's section, where no scheduler sets it.
  void add_lr() {
    const bool is_of_muon = values_.find("optimizer.params.muon_lr") != nullptr;
    const std::string name =
        is_of_muon ? "optimizer.params.muon_lr" : "optimizer.params.lr";
    const bool has = values_.find("optimizer.type") != nullptr;
    if (const auto* given = values_.find(name)) {
      set("optimizer.lr", given->value, given->origin);
    } else if (has) {
      const bool is_muon = type_of("optimizer") == "Muon";
      if_open(name, "optimizer.lr", is_muon ? kLrOfMuon : kLr);
    }
  }

  void add_scheduler() {
    const std::string type = type_of("scheduler");
    if (type.empty()) {
      add_lr();
      if_open("scheduler.type", "schedule.type", "constant");
      return;
    }
    refuse_params_of_others(type);
    const std::string params = "scheduler.params.";
    const std::string origin = values_.find("scheduler.type")->origin;
    set("schedule.type",
        type == "WarmupLR"        ? "constant"
        : type == "WarmupDecayLR" ? "linear"
                                  : "cosine",
        origin);
    set("schedule.convention", "deepspeed", origin);
    given_or(params + "warmup_num_steps", "schedule.warmup", 1000);
    if (const auto* given = values_.find(params + "warmup_type")) {
      set("schedule.warmup_type",
          choice_of(given->value.get<std::string>(), given->key->choices),
          given->origin);
    } else {
      if_open(params + "warmup_type", "schedule.warmup_type", "log");
    }
    if (type == "WarmupCosineLR") {
      add_lr();
    } else {
      given_or(params + "warmup_min_lr", "schedule.start_lr", 0.0);
      add_scheduled_lr(type);
    }
    if (type == "WarmupLR") return;
    TS_CHECK_CONFIG(!values_.is_open(params + "total_num_steps"), origin, " (",
                    type, ") needs ", params,
                    "total_num_steps: give it, or \"auto\" for the run's "
                    "steps.");
    const auto* total = values_.find(params + "total_num_steps");
    TS_CHECK_CONFIG(!total || total->value >= 1, total->origin, " is ",
                    total->value.dump(),
                    ": it must be at least 1. \"auto\" takes the run's steps.");
    given_or(params + "total_num_steps", "schedule.steps", 0);
  }

  void add_scheduled_lr(const std::string& type) {
    const std::string name = "scheduler.params.warmup_max_lr";
    const auto* given = values_.find(name);
    const bool decays = type == "WarmupDecayLR";
    if (!given && (values_.is_auto(name) || !decays)) return add_lr();
    given_or(name, "optimizer.lr", kLr);
    const auto* idle = values_.find("optimizer.params.lr");
    const double set_lr = values_.number_or(name, kLr);
    if (idle && idle->value != Json(set_lr)) {
      found_.without_effect.emplace_back(
          idle->key->name,
          c10::str(type, " goes to ", name, ", ", Json(set_lr).dump()));
    }
  }

  void refuse_params_of_others(const std::string& type) const {
    const bool cosine = type == "WarmupCosineLR";
    const auto refuse = [&](const char* param) {
      const auto* given =
          values_.find(std::string("scheduler.params.") + param);
      TS_CHECK_CONFIG(!given, given->origin, " is no parameter of ", type,
                      ". Leave it out.");
    };
    for (const char* param : {"warmup_min_lr", "warmup_max_lr"}) {
      if (cosine) refuse(param);
    }
    for (const char* param : {"warmup_min_ratio", "cos_min_ratio"}) {
      if (!cosine) refuse(param);
    }
    if (type == "WarmupLR") refuse("total_num_steps");
  }

  void add_precision() {
    const auto *bf16 = values_.find("bf16.enabled"),
               *fp16 = values_.find("fp16.enabled");
    TS_CHECK_CONFIG(
        !bf16 || !fp16 || bf16->value != true || fp16->value != true,
        bf16->origin, " and ", fp16->origin,
        " are both true, but a run computes in one type. Set one "
        "of them to false, or leave its section out.");
    bool is_open = true;
    for (const std::string type : {"bf16", "fp16"}) {
      const std::string name = type + ".enabled";
      if (values_.is_true(name)) {
        set("precision.compute", type, values_.find(name)->origin);
      }
      is_open &= !values_.is_true(name) && !values_.is_auto(name);
    }
    if (is_open) set_default("precision.compute", "fp32", "bf16.enabled");
    for (const char* name :
         {"communication_data_type", "data_types.grad_accum_dtype"}) {
      const auto* given = values_.find(name);
      if (!given) continue;
      const auto type =
          choice_of(given->value.get<std::string>(), given->key->choices);
      set("precision.reduce", type == "bfp16" ? "bf16" : type, given->origin);
    }
  }

  // To files alone: what goes to the CPU is there.
  void add_offload() {
    const DeepSpeedValue* device = nullptr;
    const DeepSpeedValue* folder = nullptr;
    const DeepSpeedValue* held = nullptr;  // states that stay where they are
    std::string offload;
    for (const std::string of : {"optimizer", "param"}) {
      const std::string section = "zero_optimization.offload_" + of;
      const auto* kind = values_.find(section + ".device");
      const auto* path = values_.find(section + ".nvme_path");
      const std::string to =
          kind ? choice_of(kind->value.get<std::string>(), kind->key->choices)
               : "none";
      if (to != "nvme") {
        if (kind && of == "optimizer") held = kind;
        if (to == "cpu" && of == "param") {
          found_.without_effect.emplace_back(kind->key->name, kind->key->why);
        }
        if (path) {
          found_.without_effect.emplace_back(path->key->name,
                                             "device is not nvme");
        }
        continue;
      }
      device = kind;
      offload = of == "param" ? "all" : "optimizer";
      TS_CHECK_CONFIG(!path || !folder || path->value == folder->value,
                      path->origin, " is ", path->value.dump(), ", and ",
                      folder->origin, " ", folder->value.dump(),
                      ": a rank has one file. Give both the same.");
      if (path) folder = path;
    }
    if (held && offload == "all") {
      found_.without_effect.emplace_back(
          held->key->name, "states go along with parameters, to files");
    } else if (held && held->value != "none") {
      found_.without_effect.emplace_back(held->key->name, held->key->why);
    }
    if (device) set("zero.offload", offload, device->origin);
    if (folder) set("zero.offload_folder", folder->value, folder->origin);
  }

  void add_mesh() {
    const auto* shards = values_.find("zero_optimization.mics_shard_size");
    if (shards && shards->value > 0) {
      set("mesh.dp_shard", shards->value, shards->origin);
    }
    for (const char* name : {"activation_checkpointing.partition_activations",
                             "activation_checkpointing.cpu_checkpointing",
                             "activation_checkpointing.number_checkpoints",
                             "pipeline.activation_checkpoint_interval"}) {
      const auto* given = values_.find(name);
      if (!given || given->value == false || given->value == 0) continue;
      TS_CHECK_CONFIG(given->value == true || given->value > 0, given->origin,
                      " is ", given->value.dump(),
                      ": it must be at least 0, which asks for none.");
      // Of all ways to recompute: it yields to the one that the run names.
      found_.settings.push_back({.key = "recompute.mode",
                                 .value = "block",
                                 .origin = given->origin,
                                 .yields = true});
    }
  }

  const DeepSpeedValues& values_;
  DeepSpeedSettings found_;
};

// A share of the learning rate.
void add_share(const DeepSpeedValues& values, const char* param, double open,
               const char* key, double lr,
               std::vector<DeepSpeedSetting>& settings) {
  const std::string name = std::string("scheduler.params.") + param;
  if (values.is_auto(name)) return;
  const auto* given = values.find(name);
  settings.push_back(
      {.key = key,
       .value = values.number_or(name, open) * lr,
       .origin = given ? given->origin
                       : values.source() + ": DeepSpeed's default of " + name,
       .yields = given == nullptr,
       .is_default = given == nullptr,
       .is_rounded = true});
}

// Of a run in fp16, whose section says so or leaves it to the run.
void add_loss_scale(const DeepSpeedValues& values,
                    std::vector<DeepSpeedSetting>& settings) {
  const auto* const scale = values.find("fp16.loss_scale");
  const bool is_fixed = scale && scale->value.is_number() && scale->value != 0;
  const auto add = [&](const std::string& name, const char* key,
                       const Json& open, const auto& told) {
    if (values.is_auto(name)) return;
    const auto* given = values.find(name);
    if (is_fixed && given == nullptr) return;  // of a scale that is found
    settings.push_back(
        {.key = key,
         .value = given ? told(given->value) : open,
         .origin = given ? given->origin
                         : values.source() + ": DeepSpeed's default of " + name,
         .yields = given == nullptr,
         .is_default = given == nullptr});
  };
  const auto as_it_is = [](const Json& value) { return value; };
  const auto power = [](const Json& value) {
    return Json(std::ldexp(1.0, static_cast<int>(std::clamp<int64_t>(
                                    value.get<int64_t>(), -1000, 1000))));
  };
  add("fp16.loss_scale", "precision.loss_scale", 0.0, as_it_is);
  add("fp16.initial_scale_power", "precision.initial_loss_scale", 65536.0,
      power);
  add("fp16.loss_scale_window", "precision.scale_growth_interval", 1000,
      as_it_is);
  add("fp16.hysteresis", "precision.scale_hysteresis", 2, as_it_is);
  add("fp16.consecutive_hysteresis", "precision.consecutive_hysteresis", false,
      as_it_is);
  add("fp16.min_loss_scale", "precision.min_loss_scale", 1.0, as_it_is);
}

}  // namespace

DeepSpeedSettings plain_settings(const DeepSpeedValues& values) {
  return Translation(values).all();
}

std::vector<DeepSpeedSetting> settings_that_follow(
    const DeepSpeedValues& values, const RunConfig& config) {
  std::vector<DeepSpeedSetting> settings;
  if (const auto* scheduler = values.find("scheduler.type")) {
    const double lr = config.optimizer.lr;
    if (config.schedule.type == "cosine") {
      add_share(values, "warmup_min_ratio", 0.0, "schedule.start_lr", lr,
                settings);
      add_share(values, "cos_min_ratio", 1e-4, "schedule.min_lr", lr, settings);
    } else if (config.schedule.type == "linear") {
      const auto* given = values.find("scheduler.params.warmup_min_lr");
      settings.push_back({.key = "schedule.min_lr",
                          .value = config.schedule.start_lr,
                          .origin = (given ? given : scheduler)->origin,
                          .yields = given == nullptr});
    }
  }
  if (config.precision.compute == "fp16" && values.has_section("fp16")) {
    add_loss_scale(values, settings);
  }
  if (const auto* given = values.find("zero_optimization.reduce_bucket_size")) {
    const auto bytes = static_cast<double>(
        c10::elementSize(config.precision.gradient_dtype()));
    settings.push_back({.key = "zero.bucket_mb",
                        .value = given->value.get<double>() * bytes / (1 << 20),
                        .origin = given->origin,
                        .is_rounded = true});
  }
  return settings;
}

}  // namespace tessera::engine::detail
