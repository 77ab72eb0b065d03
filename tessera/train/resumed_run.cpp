#include "tessera/train/resumed_run.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/checkpoint/local_place.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/engine/kept_states.h"
#include "tessera/models/family.h"
#include "tessera/models/model.h"
#include "tessera/train/changes.h"
#include "tessera/train/rewind.h"
#include "tessera/train/trained_model.h"

namespace tessera::train {

using engine::RunConfig;

namespace {

namespace fs = std::filesystem;
using detail::Json;

// Keys of the model that decide no tensor.
constexpr std::string_view kOfNoTensor[] = {"from",
                                            "load_weights",
                                            "dropout",
                                            "norm_eps",
                                            "rope_theta",
                                            "rope_theta_local",
                                            "window",
                                            "window_every",
                                            "window_first_full",
                                            "query_pre_attn_scalar",
                                            "lora.from",
                                            "lora.alpha",
                                            "moe.aux_loss",
                                            "moe.top_k",
                                            "moe.score",
                                            "moe.normalize",
                                            "moe.scale",
                                            "moe.groups",
                                            "moe.capacity_factor",
                                            "moe.z_loss",
                                            "moe.bias_rate",
                                            "moe.top_groups",
                                            "moe.balance",
                                            "moe.choice",
                                            "mtp.weight"};

// Each parameter's shape, and those that are trained.
using Shapes = std::map<std::string, std::vector<int64_t>>;

Shapes shapes_of(const RunConfig& config) {
  const auto model = models::make_model(config.model);
  Shapes shapes;
  for (const auto& parameter : nn::parameters_of(*model)) {
    shapes[parameter.name] = parameter.spec->layout.global_shape();
    if (!parameter.spec->is_frozen) shapes["trained " + parameter.name] = {};
  }
  return shapes;
}

engine::KeptStates kept_by(const RunConfig& config) {
  return {config.optimizer,
          config.precision.compute == "fp64" ? "fp64" : "fp32"};
}

class Differences {
 public:
  Differences(const RunConfig& saved, const RunConfig& now)
      : saved_(Json::parse(to_json(saved))),
        now_(Json::parse(to_json(now))),
        has_learned_positions_(
            models::family_named(now.model.family).learned_positions) {
    if (shapes_of(saved) != shapes_of(now)) {
      add_all(saved_["model"], now_["model"], "");
      is_model_ = !told_.empty();
    }
    tell("precision.compute", saved.precision.compute, now.precision.compute);
    if (saved.pipeline.delayed() != now.pipeline.delayed()) {
      tell("pipeline.schedule", saved.pipeline.schedule, now.pipeline.schedule);
    }
    for (auto& other : engine::other_states(kept_by(saved), kept_by(now))) {
      told_.push_back(std::move(other));
    }
  }

  const std::vector<std::string>& told() const { return told_; }
  // Among them is one of the model's.
  bool is_model() const { return is_model_; }

 private:
  void tell(const std::string& key, const Json& saved, const Json& now) {
    if (saved == now) return;
    told_.push_back(c10::str(key, " is ", saved.dump(), " in it and ",
                             now.dump(), " in this run"));
  }

  // Positions that are learned are a tensor.
  bool decides_tensors(const std::string& key) const {
    if (key == "max_seq") return has_learned_positions_;
    if (key.starts_with("rope_scaling.")) return false;
    return std::ranges::find(kOfNoTensor, key) == std::end(kOfNoTensor);
  }

  void add_all(const Json& saved, const Json& now, const std::string& prefix) {
    for (const auto& item : now.items()) {
      const std::string key = prefix + item.key();
      if (item.value().is_object()) {
        add_all(saved[item.key()], item.value(), key + ".");
      } else if (decides_tensors(key)) {
        tell("model." + key, saved[item.key()], item.value());
      }
    }
  }

  const Json saved_, now_;
  const bool has_learned_positions_;
  std::vector<std::string> told_;
  bool is_model_ = false;
};

// As far as this version knows its keys: else the ranks compare tensors.
std::optional<RunConfig> config_of(const SavedRun& saved,
                                   const std::string& source) {
  try {
    return engine::saved_run_config(saved.config, source);
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Where it is, and what it says; nowhere: there is none.
std::pair<std::string, checkpoint::Manifest> resumed_manifest(
    const RunConfig& config, const std::string& resume,
    const std::string& folder) {
  const auto& checkpoint = config.checkpoint;
  if (resume == "auto" && checkpoint.saves_locally()) {
    const auto local = checkpoint::newest_local_checkpoint(
        {.local_dir = checkpoint.local_dir, .checkpoints = folder});
    if (!local.empty()) return {local, checkpoint::read_manifest_alone(local)};
  }
  const std::string found = resumed_folder(resume, folder);
  if (found.empty()) return {};
  const auto in_memory = checkpoint::local_checkpoint_folder(
      {.local_dir = checkpoint.local_dir, .checkpoints = folder});
  TS_CHECK_CONFIG(
      in_memory.empty() || !fs::equivalent(fs::path(found) / "..", in_memory),
      "--resume: ", found,
      " is in the memory of hosts, each of which may have a part "
      "of it. --resume auto goes on from it.");
  return {found, checkpoint::read_manifest(found)};
}

}  // namespace

std::string checkpoint_of(const std::string& resume, const RunFolder& own) {
  if (resume == "auto" || resume == "never" ||
      fs::exists(fs::path(resume) / checkpoint::kManifestName)) {
    return resume;
  }
  std::error_code none;
  const bool is_own = fs::equivalent(resume, own.path(), none) ||
                      fs::equivalent(resume, own.checkpoints(), none);
  if (is_own && !checkpoint::newest_local_checkpoint(own.local()).empty()) {
    return "auto";
  }
  const std::string newest = newest_checkpoint_in(resume);
  if (newest.empty()) return resume;
  return is_own ? "auto" : newest;
}

std::string resumed_folder(const std::string& resume,
                           const std::string& folder) {
  if (resume == "never") return "";
  if (resume == "auto") {
    const auto newest = checkpoint::newest_checkpoint(folder);
    return newest ? checkpoint::step_folder(folder, newest->step) : "";
  }
  TS_CHECK_IO(fs::exists(fs::path(resume) / checkpoint::kManifestName),
              "--resume: ", resume,
              " is no checkpoint, and no folder of a run that has one. Give "
              "auto, never, RUN_DIR/NAME, or its checkpoints/step-N.");
  return resume;
}

void go_on_from(const std::string& resume, const std::string& folder) {
  if (checkpoint::is_checkpoint_in(folder, resume)) {
    checkpoint::go_back_to(folder, checkpoint::read_manifest(resume).step);
  }
}

void refuse_another_line(const SavedRun& saved, const RunConfig& config,
                         const std::string& resume, const std::string& source) {
  const std::string now = to_json(config);
  if (resume == "auto" && !config.checkpoint.dir.empty()) {
    refuse_another_run(saved.config, now);
  }
  if (const auto was = config_of(saved, source)) {
    refuse_other_states(*was, config, source);
  }
  refuse_another_model(saved.config, now, source);
}

void warn_of_changes(const SavedRun& saved, const RunConfig& config,
                     uint64_t data, uint64_t caches) {
  for (const auto& change : trained_otherwise(saved.config, to_json(config))) {
    log::warning("the checkpoint was trained otherwise: ", change);
  }
  if (saved.data != 0 && saved.data != data) {
    log::warning(
        "the data is not what the checkpoint was trained on: other files, or "
        "another tokenizer. The run goes on with what data.train names now.");
    return;  // which have other tokens
  }
  if (saved.caches != 0 && caches != 0 && saved.caches != caches) {
    log::warning(
        "the tokens of the data are not those that the checkpoint was trained "
        "on, though its files are: their cache was made anew, on another day "
        "where the chat template writes the date (strftime_now), or by another "
        "version of Tessera or data.field. The run goes on with the tokens of "
        "now. To go on with those of before, put their cache back.");
  }
}

void refuse_other_states(const RunConfig& saved, const RunConfig& now,
                         const std::string& source) {
  const Differences found(saved, now);
  const std::string way_out =
      found.is_model() ? "values, or begin anew: give the run another run.name."
      : saved.model.lora.rank > 0
          ? "values; or begin a new run (another run.name) from its weights, "
            "the adapters among them: tessera convert --from " +
                source +
                " --to FOLDER --merge, then --model.from=FOLDER "
                "--model.load_weights=true."
          : "values; or begin a new run (another run.name) from its weights: "
            "--model.from=" +
                source + " --model.load_weights=true.";
  TS_CHECK_CONFIG(
      found.told().empty(), source,
      " holds other tensors than this run has: ", c10::Join("; ", found.told()),
      ". Give these keys the checkpoint's ", way_out);
}

void check_resumed(const RunConfig& config, const std::string& resume,
                   const std::string& folder) {
  const auto [found, manifest] = resumed_manifest(config, resume, folder);
  if (found.empty()) return;
  const SavedRun saved = saved_run_from(manifest.extra, found);
  refuse_another_line(saved, config, resume, found);
  if (!fs::exists(fs::path(folder) / kRewoundName)) {
    refuse_skipping_what_was_taken(saved.config, to_json(config), saved.step,
                                   saved.samples, saved.left_out);
  }
}

}  // namespace tessera::train
