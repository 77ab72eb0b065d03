#include "tessera/train/trained_model.h"

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/peft_folder.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/data/special_tokens.h"
#include "tessera/data/tokenizer.h"
#include "tessera/engine/model_sizes.h"
#include "tessera/engine/run_config.h"
#include "tessera/models/adapters.h"
#include "tessera/nn/parameter.h"
#include "tessera/train/model_files.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/state.h"

namespace tessera::train {

using engine::RunConfig;
using engine::saved_run_config;

namespace {

namespace fs = std::filesystem;

bool is_checkpoint(const fs::path& path) {
  return fs::exists(path / checkpoint::kManifestName);
}

// Where the run in this folder keeps its checkpoints: where its configuration
// says, which may have changed, else in the folder.
fs::path checkpoints_of(const fs::path& run) {
  const fs::path own = run / "checkpoints";
  const fs::path config = run / "config.json";
  if (!fs::exists(config)) return own;
  const std::string text = tessera::detail::read_json_text(config);
  const RunConfig saved = saved_run_config(text, config.string());
  if (saved.checkpoint.dir.empty()) return own;  // wherever the run lies now
  const fs::path elsewhere = RunFolder(saved).checkpoints();
  if (checkpoint::has_checkpoints(elsewhere.string())) return elsewhere;
  const bool has_own = checkpoint::has_checkpoints(own.string());
  log::warning(config.string(), " has the run's checkpoints in ",
               fs::absolute(elsewhere).string(), ", where none is",
               has_own ? c10::str(": those of ", own.string(),
                                  " are taken, which may be older")
                       : std::string());
  return own;
}

// The run folder of RUN/checkpoints/step-N, where it keeps its tokenizer and
// the model's files: above the checkpoint, or where the run's configuration has
// it.
fs::path run_folder_of(const fs::path& checkpoint, const RunConfig& run) {
  const fs::path itself =  // with a slash or without
      fs::absolute(checkpoint / "").lexically_normal().parent_path();
  const fs::path above = itself.parent_path().parent_path();
  const fs::path configured = RunFolder(run).path();
  const auto keeps = [](const fs::path& run_folder) {
    return fs::exists(run_folder / "tokenizer.json") ||
           fs::exists(kept_model_files(run_folder.string()));
  };
  return !keeps(above) && keeps(configured) ? configured : above;
}

// By the tokenizer, where there is one: what begins a text, and what ends it,
// as a chat's turn and as a document.
void take_tokens(models::HuggingFaceConfig& config,
                 const fs::path& tokenizer_folder) {
  if (!fs::exists(tokenizer_folder / "tokenizer.json")) return;
  const auto tokenizer = data::Tokenizer::load(tokenizer_folder.string());
  const auto end = tokenizer.end_of_text();
  const auto& before = tokenizer.spec().before;
  config.bos_token = before.empty() ? end : std::optional(before[0]);
  config.eos_tokens.clear();
  if (const auto token = data::eos_token_of(tokenizer_folder.string())) {
    if (const auto id = tokenizer.id_of(*token)) config.eos_tokens = {*id};
  }
  if (end && std::ranges::count(config.eos_tokens, *end) == 0) {
    config.eos_tokens.push_back(*end);
  }
}

ModelSource source_of_checkpoint(const fs::path& path, c10::ScalarType dtype) {
  auto reading = std::make_shared<const checkpoint::Reading>(path.string());
  const auto manifest = checkpoint::read_manifest(path.string());
  const SavedRun saved = saved_run_from(manifest.extra, path.string());
  RunConfig run = saved_run_config(saved.config, path.string());
  const bool began_random = !run.model.load_weights;
  run.model.load_weights = false;  // the run did, once
  ModelSource source{.path = path.string(),
                     .is_checkpoint = true,
                     .began_random = began_random,
                     .has_updates = saved.step > saved.skipped,
                     .config = {},
                     .tokenizer_folder = run_folder_of(path, run).string()};
  const std::string& folder = source.tokenizer_folder;
  const std::string kept = kept_model_files(folder);
  if (fs::exists(kept)) {
    source.model_files = kept;
    source.has_files_tokenizer = has_same_tokenizer(folder, kept);
    source.config = models::read_hugging_face_config(kept);
  }
  source.config.model = run.model;
  source.config.dtype = dtype;
  source.data = run.data;
  source.reading = std::move(reading);
  if (source.model_files.empty() || !source.has_files_tokenizer) {
    take_tokens(source.config, folder);
  }
  return source;
}

// With the checkpoints of a run, or of a folder of its own.
std::string checkpoints_in(const std::string& folder) {
  return checkpoint::has_checkpoints(folder) ? folder
                                             : checkpoints_of(folder).string();
}

// `latest` is not asked: a kill may have left it behind.
std::string newest_in(const std::string& checkpoints) {
  const auto all = checkpoint::list_checkpoints(checkpoints);
  for (const auto& found : all) {
    const std::string step = checkpoint::step_folder(checkpoints, found.step);
    if (found.complaint.empty()) return step;
    log::warning(found.complaint, ": ", step, " is passed over");
  }
  TS_CHECK_IO(all.empty(), "none of the checkpoints in ", checkpoints,
              " can be read: ", all.front().complaint);
  return "";
}

// A run that goes on may remove what was the newest: then there is a newer one.
std::optional<ModelSource> source_of_newest(const std::string& folder,
                                            c10::ScalarType dtype) {
  if (checkpoint::is_hugging_face_folder(folder)) return std::nullopt;
  const std::string checkpoints = checkpoints_in(folder);
  while (true) {
    const int64_t before = checkpoint::newest_commit(checkpoints);
    try {
      const std::string newest = newest_in(checkpoints);
      if (newest.empty()) return std::nullopt;
      return source_of_checkpoint(newest, dtype);
    } catch (const Error&) {
      if (checkpoint::newest_commit(checkpoints) == before) throw;
    }
  }
}

std::string average_of(const std::string& weight) {
  return "optimizer.average." + weight.substr(std::string("model.").size());
}

// What was not trained has none.
void take_averages(const ModelSource& source, checkpoint::State& state) {
  const auto manifest = checkpoint::read_manifest(source.path);
  for (auto& tensor : state.tensors) {
    const std::string average = average_of(tensor.name);
    if (manifest.find(average) == nullptr) continue;
    tensor.name = average;
    tensor.slices.clear();
    tensor.finer.clear();
  }
}

// From weights to what is read for them. Before the first update the optimizer
// has nothing of them.
void choose_tensors(const ModelSource& source, checkpoint::State& state) {
  if (!source.has_updates) {
    for (auto& tensor : state.tensors) tensor.finer.clear();
  } else if (source.averaged) {
    take_averages(source, state);
  }
}

// Weights of a run, of any type.
const checkpoint::LoadOptions kOfWeights = {.partial = true, .convert = true};

void load(const ModelSource& source, checkpoint::State state,
          comm::Group& world) {
  choose_tensors(source, state);
  checkpoint::load(source.path, state, world, kOfWeights);
}

// All of a parameter, or one of its experts.
mesh::Box box_of(const std::vector<int64_t>& shape,
                 std::optional<int64_t> expert) {
  mesh::Box box = mesh::Box::whole(shape);
  if (expert) {
    box.offset[0] = *expert;
    box.size[0] = 1;
  }
  return box;
}

checkpoint::WholeParameter parameters_of_checkpoint(const ModelSource& source,
                                                    c10::ScalarType dtype) {
  struct Saved {
    std::string name;  // in the checkpoint
    std::vector<int64_t> shape;
  };
  const auto model = models::make_model(source.config.model);
  const auto parameters = nn::parameters_of(*model);
  checkpoint::State state;
  for (const auto& parameter : parameters) {
    const auto& layout = parameter.spec->layout;
    const std::string name = "model." + parameter.name;
    state.tensors.push_back({.name = name,
                             .global_shape = layout.global_shape(),
                             .box = box_of(layout.global_shape(), {}),
                             .local = at::empty({0}, dtype),
                             .slices = nn::names_of_experts(name, layout),
                             .finer = master_of(parameter.name)});
  }
  choose_tensors(source, state);
  std::map<std::string, Saved> saved;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& tensor = state.tensors[i];
    saved[parameters[i].name] = {tensor.name, tensor.global_shape};
  }
  const auto reader = std::make_shared<checkpoint::TensorReader>(
      source.path, std::move(state), kOfWeights);
  return [reader, saved = std::move(saved)](const std::string& name,
                                            std::optional<int64_t> expert) {
    const Saved& of = saved.at(name);
    const at::Tensor values = reader->read(of.name, box_of(of.shape, expert));
    return expert ? values.select(0, 0) : values;
  };
}

// Each weight with what the adapter beside it adds.
checkpoint::WholeParameter with_adapters(checkpoint::WholeParameter whole,
                                         const models::ModelConfig& config) {
  const auto model = models::make_model(config);
  std::map<std::string, std::string> adapters;  // by weight
  for (const auto& layer : models::adapted_linears(*model)) {
    adapters[layer.name + ".weight"] = layer.name + ".lora_";
  }
  return [whole = std::move(whole), adapters = std::move(adapters),
          scale = config.lora.scale()](const std::string& name,
                                       std::optional<int64_t> expert) {
    at::Tensor values = whole(name, expert);
    const auto found = adapters.find(name);
    if (found == adapters.end()) return values;
    const std::string& prefix = found->second;
    return values.add_(
        at::matmul(whole(prefix + "B", {}), whole(prefix + "A", {})) * scale);
  };
}

void refuse_adapters(const std::string& path) {
  if (!checkpoint::is_peft_folder(path)) return;
  const std::string base = checkpoint::base_of_peft(path);
  TS_CHECK_IO(checkpoint::is_hugging_face_folder(path), path,
              ": is a PEFT folder of adapters",
              base.empty() ? "" : c10::str(" for ", base),
              ", which are no model alone. Give the run that has them, or what "
              "tessera convert --merge makes of it; a run begins from them by "
              "model.from (the model) and model.lora.from (this folder).");
}

}  // namespace

std::string newest_checkpoint_in(const std::string& folder) {
  if (checkpoint::is_hugging_face_folder(folder)) return "";
  return newest_in(checkpoints_in(folder));
}

ModelSource find_trained_model(const std::string& path, c10::ScalarType dtype) {
  TS_CHECK_IO(fs::is_directory(path), path, ": there is no such folder.");
  if (is_checkpoint(path)) return source_of_checkpoint(path, dtype);
  if (auto source = source_of_newest(path, dtype)) return *std::move(source);
  refuse_adapters(path);
  TS_CHECK_IO(checkpoint::is_hugging_face_folder(path), path,
              ": neither a checkpoint (manifest.json), nor a run folder with "
              "one (checkpoints/step-N), nor a Hugging Face folder "
              "(config.json of a model).");
  ModelSource source{.path = path,
                     .config = checkpoint::hugging_face_config(path),
                     .tokenizer_folder = path,
                     .model_files = path};
  source.config.model.from = path;
  source.config.model.load_weights = true;
  return source;
}

std::vector<int64_t> stop_tokens(const ModelSource& source) {
  const fs::path file = fs::path(source.model_files) / "generation_config.json";
  const bool is_said = !source.model_files.empty() &&
                       source.has_files_tokenizer && fs::exists(file);
  if (!is_said) return source.config.eos_tokens;
  return models::eos_tokens_of(detail::read_json_text(file), file.string())
      .value_or(source.config.eos_tokens);
}

void read_averages(ModelSource& source) {
  const auto is_average = [](const auto& tensor) {
    return tensor.name.starts_with("optimizer.average.");
  };
  TS_CHECK_CONFIG(
      source.is_checkpoint &&
          std::ranges::any_of(checkpoint::read_manifest(source.path).tensors,
                              is_average),
      "--ema: ", source.path,
      " has no averages of its weights: a run keeps them where optimizer.ema "
      "is set. Leave --ema out.");
  source.averaged = true;
}

c10::ScalarType dtype_of_files(const ModelSource& source) {
  return source.model_files.empty()
             ? at::kFloat
             : models::read_hugging_face_config(source.model_files).dtype;
}

bool is_fp64(const ModelSource& source) {
  if (!source.is_checkpoint) return dtype_of_files(source) == at::kDouble;
  return std::ranges::any_of(
      checkpoint::read_manifest(source.path).tensors,
      [](const auto& tensor) { return tensor.dtype == at::kDouble; });
}

namespace {

std::vector<std::string> adapted_layers(models::ModelConfig model,
                                        const models::LoraConfig& lora) {
  model.lora = lora;
  const auto made = models::make_model(model);
  std::vector<std::string> names;
  for (const auto& layer : models::adapted_linears(*made)) {
    names.push_back(layer.name);
  }
  return names;
}

// The user's own targets may only say what the folder's adapters say.
void check_own_targets(const models::ModelConfig& model,
                       models::LoraConfig theirs) {
  constexpr size_t kNamedAtMost = 8;
  const auto given = adapted_layers(model, theirs);
  theirs.targets = model.lora.targets;
  TS_CHECK_CONFIG(adapted_layers(model, theirs) == given,
                  "model.lora.targets is ",
                  some_of(theirs.targets, kNamedAtMost),
                  ", but the folder in model.lora.from, ", theirs.from,
                  ", has adapters of ", some_of(given, kNamedAtMost),
                  ". Leave the key out.");
}

// Where model.lora.from is set: its rank, alpha and targets, for this model.
void read_adapters(RunConfig& config, const config::Provenance& origins) {
  models::ModelConfig& model = config.model;
  if (model.lora.from.empty()) return;
  TS_CHECK_CONFIG(
      model.load_weights && checkpoint::is_hugging_face_folder(model.from),
      "model.lora.from is ", model.lora.from,
      ", whose adapters are for the weights of a Hugging Face folder. Set "
      "model.from to that folder, and model.load_weights to true.");
  const auto theirs = checkpoint::read_peft_config(model.lora.from);
  const auto refuse = [&](const char* key, const auto& mine,
                          const auto& given) {
    TS_CHECK_CONFIG(!config::is_set(origins, key) || mine == given, key, " is ",
                    mine, ", but the folder in model.lora.from has ", given,
                    ". Leave the key out.");
  };
  refuse("model.lora.rank", model.lora.rank, theirs.rank);
  refuse("model.lora.alpha", model.lora.alpha, theirs.alpha);
  if (config::is_set(origins, "model.lora.targets"))
    check_own_targets(model, theirs);
  try {
    model.lora = theirs;
    checkpoint::check_peft(theirs.from, *models::make_model(model));
  } catch (const Error& error) {
    TS_CHECK_CONFIG(false, "model.lora.from is ", theirs.from,
                    ", which does not go with ", model.from, ": ",
                    message_of(error));
  }
}

}  // namespace

void read_model_source(RunConfig& config, const config::Provenance& origins) {
  const std::string& from = config.model.from;
  if (from.empty() || !fs::is_directory(from) ||
      checkpoint::is_hugging_face_folder(from)) {
    engine::read_model_folder(config, origins);
  } else {
    const auto source = find_trained_model(from, at::kFloat);
    engine::take_sizes(config, source.config.model, origins);
    TS_CHECK_CONFIG(
        !config.model.load_weights || source.config.model.lora.rank == 0,
        "model.from is ", from,
        ", which was trained with model.lora: its weights are in "
        "two parts. Start from what tessera convert --merge makes "
        "of it.");
    TS_CHECK_CONFIG(
        !config.model.load_weights || !config.model.moe.bias_balance ||
            source.config.model.has_score_bias(),
        "model.moe.bias_balance is true, but the run in model.from, ", from,
        ", has no bias to load. Balance by model.moe.aux_loss, or train from "
        "the beginning (model.load_weights false).");
  }
  read_adapters(config, origins);
}

void check_first_weights(const RunConfig& config) {
  const auto& from = config.model;
  if (!from.load_weights || !checkpoint::is_hugging_face_folder(from.from)) {
    return;
  }
  checkpoint::check_hugging_face(from.from, *models::make_model(from));
}

void load_first_weights(const RunConfig& config, engine::RankModel& model,
                        comm::Group& world) {
  const auto& from = config.model;
  if (!from.load_weights || checkpoint::is_hugging_face_folder(from.from)) {
    return;  // none are asked for, or they are there
  }
  checkpoint::State state = weights_of(model.composed());
  // Adapters are new beside them.
  std::erase_if(state.tensors, [](const auto& tensor) {
    return tensor.name.ends_with(".lora_A") || tensor.name.ends_with(".lora_B");
  });
  load(find_trained_model(from.from, at::kFloat), std::move(state), world);
}

checkpoint::WholeParameter parameters_of(const ModelSource& source,
                                         c10::ScalarType dtype, bool merges) {
  const models::ModelConfig& config = source.config.model;
  if (!source.is_checkpoint) {
    return checkpoint::parameters_in(source.path, config, dtype);
  }
  auto whole = parameters_of_checkpoint(source, dtype);
  return merges ? with_adapters(std::move(whole), config) : whole;
}

std::unique_ptr<engine::RankModel> open_for_evaluation(
    const ModelSource& source, const RunConfig& config,
    comm::Communicator& ranks) {
  // Sizes that the files do not bear out are refused before memory is taken.
  if (!source.is_checkpoint) {
    checkpoint::check_hugging_face(source.path,
                                   *models::make_model(config.model));
  }
  auto model = std::make_unique<engine::RankModel>(
      config, ranks, program::Purpose::kEvaluation);
  if (source.is_checkpoint) {
    load(source, weights_of(model->composed()), ranks.world());
  }
  return model;
}

}  // namespace tessera::train
