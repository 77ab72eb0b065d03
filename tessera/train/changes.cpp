#include "tessera/train/changes.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string_view>

#include "tessera/comm/agree.h"
#include "tessera/core/config_changes.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/data/data_config.h"
#include "tessera/engine/run_config.h"

namespace tessera::train {
namespace {

using config::changes_in;
using detail::Json;

// A section ends with a dot.
constexpr std::string_view kDecideTheUpdates[] = {"run.seed",
                                                  "data.seq_len",
                                                  "data.shuffle",
                                                  "data.field",
                                                  "data.format",
                                                  "data.weights",
                                                  "data.valid_share",
                                                  "data.chat_template",
                                                  "data.pair",
                                                  "data.skip",
                                                  "data.loss_on",
                                                  "data.packing",
                                                  "data.intra_document_masking",
                                                  "batch.global",
                                                  "precision.",
                                                  "model.moe.",
                                                  "model.dropout",
                                                  "model.max_seq",
                                                  "model.mtp.weight",
                                                  "optimizer.",
                                                  "schedule."};
// Of the section model, what decides nothing that is computed of its weights:
// all other keys do, also those that are still to come. Tensors that come and
// go with some of these resumed_run.h compares.
constexpr std::string_view kOnlyTrainTheModel[] = {
    "model.from",         "model.load_weights",  "model.dropout",
    "model.max_seq",      "model.lora.from",     "model.lora.targets",
    "model.moe.aux_loss", "model.moe.balance",   "model.moe.z_loss",
    "model.moe.noise",    "model.moe.bias_rate", "model.moe.bias_balance",
    "model.mtp.weight"};
// What the loss on held-out data is of.
constexpr std::string_view kDecideTheValidation[] = {
    "data.valid",   "data.valid_share",
    "data.exclude", "data.format",
    "data.field",   "data.chat_template",
    "data.pair",    "data.loss_on",
    "data.packing", "data.intra_document_masking",
    "data.seq_len", "validate.samples",
    "validate.ema"};
// And where it is a share of the training data.
constexpr std::string_view kDecideTheShare[] = {"data.train", "data.weights"};
constexpr std::string_view kOfTheHost[] = {"run.dir",
                                           "run.device",
                                           "run.threads",
                                           "model.from",
                                           "data.train",
                                           "data.valid",
                                           "data.tokenizer",
                                           "checkpoint.dir",
                                           "zero.offload_folder",
                                           "model.lora.from",
                                           "data.chat_template",
                                           "checkpoint.local_dir",
                                           "comm.timeout_s",
                                           "comm.silence_s",
                                           "monitor.every",
                                           "monitor.tensorboard"};

template <size_t n>
bool is_among(const std::string& key, const std::string_view (&keys)[n]) {
  return std::ranges::any_of(keys, [&](std::string_view each) {
    return each.ends_with('.') ? key.starts_with(each) : key == each;
  });
}

bool decides_the_model(const std::string& key) {
  return key.starts_with("model.") && !is_among(key, kOnlyTrainTheModel);
}

// The schedule's steps where they decide a learning rate, as older versions
// have them: those of the run.
int64_t steps_of_schedule(const Json& config) {
  const Json& schedule = config["schedule"];
  if (schedule["type"] == "constant") return 0;
  const int64_t own = schedule.value("steps", int64_t{0});
  return own > 0 ? own : config["run"]["steps"].get<int64_t>();
}

// Beside what keys say: a run that is longer is scheduled otherwise.
void add_schedule(const std::string& saved, const std::string& now,
                  std::vector<std::string>& changes) {
  const Json before = Json::parse(saved), after = Json::parse(now);
  const int64_t was = steps_of_schedule(before), is = steps_of_schedule(after);
  if (was == 0 || is == 0 || was == is) return;
  changes.push_back(c10::str(
      "the learning rate is scheduled over ", is, " steps instead of ", was,
      " (run.steps); schedule.steps ", was, " keeps it as it was"));
}

}  // namespace

std::vector<std::string> trained_otherwise(const std::string& saved,
                                           const std::string& now) {
  auto changes = changes_in(saved, now, [](const std::string& key) {
    return is_among(key, kDecideTheUpdates) && !decides_the_model(key) &&
           key != "schedule.steps";
  });
  add_schedule(saved, now, changes);
  return changes;
}

bool validated_otherwise(const std::string& saved, const std::string& now) {
  const Json after = Json::parse(now);
  const bool is_share = after["data"]["valid_share"].get<double>() > 0;
  const auto changes = changes_in(saved, now, [&](const std::string& key) {
    return is_among(key, kDecideTheValidation) ||
           (is_share && is_among(key, kDecideTheShare));
  });
  return !changes.empty();
}

void refuse_another_model(const std::string& saved, const std::string& now,
                          const std::string& source) {
  const auto changes = changes_in(saved, now, decides_the_model);
  TS_CHECK_CONFIG(changes.empty(), source,
                  " is of another model: ", c10::Join("; ", changes),
                  ". Its weights fit, but would compute something else. Set "
                  "these keys back, or start a new run (run.name) whose "
                  "model.from is an export of this one.");
}

std::vector<std::string> computed_otherwise(const models::ModelConfig& model,
                                            const models::ModelConfig& other) {
  // Of capacity a folder says nothing, and drops nothing.
  constexpr std::string_view kLeftOut[] = {"model.lora.", "model.mtp.",
                                           "model.moe.capacity_factor"};
  const auto text_of = [](const models::ModelConfig& of) {
    engine::RunConfig config;
    config.model = of;
    auto& scaling = config.model.rope_scaling;
    if (scaling.type == "linear") scaling.original_max_seq = 0;  // not used
    return to_json(config);
  };
  return changes_in(text_of(model), text_of(other),
                    [&](const std::string& key) {
                      return decides_the_model(key) && !is_among(key, kLeftOut);
                    });
}

void refuse_another_run(const std::string& saved, const std::string& now) {
  const Json before = Json::parse(saved), after = Json::parse(now);
  const Json &owner = before["run"]["name"], &own = after["run"]["name"];
  TS_CHECK_CONFIG(
      owner == own, "checkpoint.dir ", after["checkpoint"]["dir"].dump(),
      " holds checkpoints of the run ", owner.dump(), ", not of ", own.dump(),
      ". Give each run a checkpoint.dir of its own; --resume PATH "
      "goes on from another run's checkpoint.");
}

void refuse_skipping_what_was_taken(const std::string& saved,
                                    const std::string& now, int64_t step,
                                    int64_t samples,
                                    const std::vector<data::Skip>& left_out) {
  const auto skip_of = [](const std::string& config) {
    return Json::parse(config)["data"].value("skip",
                                             std::vector<std::string>());
  };
  const auto before = skip_of(saved), after = skip_of(now);
  if (before.empty() && after.empty()) return;
  const auto batch = Json::parse(now)["batch"]["global"].get<int64_t>();
  TS_CHECK_CONFIG(samples == step * batch, "data.skip counts batches of ",
                  batch, " samples (batch.global), but the ", step,
                  " steps of the checkpoint ", "took ", samples,
                  " samples. Go on with the batch.global of all of them.");
  // Those before the last sample that was taken.
  const auto passed = [&](const std::vector<std::string>& skip) {
    int64_t last = samples - 1;
    std::vector<data::Skip> all;
    const auto skips = data::DataConfig{.skip = skip}.skips(batch);
    for (const auto& each : data::joined(skips, left_out)) {
      if (last < each.begin) break;
      last += each.end - each.begin;
      all.push_back(each);
    }
    return all;
  };
  TS_CHECK_CONFIG(
      passed(before) == passed(after), "data.skip is ", c10::Join(", ", after),
      ", but the checkpoint after step ", step, " was trained with ",
      before.empty() ? "none" : c10::Join(", ", before),
      ", and what it has taken cannot be left out any more. Go on from a "
      "checkpoint before it (--resume PATH), or set data.skip back.");
}

void compare_across(comm::Group& world, const std::string& config) {
  if (world.size() == 1) return;
  const auto changes = changes_in(
      comm::text_of_rank_0(world, config), config,
      [](const std::string& key) { return !is_among(key, kOfTheHost); });
  std::string complaint;
  if (!changes.empty()) {
    complaint = c10::str("rank ", world.ranks().at(world.rank()),
                         " was started otherwise than rank ",
                         world.ranks().at(0), ": ", c10::Join("; ", changes),
                         ". Give all ranks the same file and flags.");
  }
  const std::string first = comm::first_complaint(world, complaint);
  TS_CHECK_CONFIG(first.empty(), first);
}

}  // namespace tessera::train
