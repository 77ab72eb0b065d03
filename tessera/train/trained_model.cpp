#include "tessera/train/trained_model.h"

#include <filesystem>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/data/tokenizer.h"
#include "tessera/engine/run_config.h"
#include "tessera/nn/parameter.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/state.h"

namespace tessera::train {

using engine::run_config_from_text;
using engine::RunConfig;

namespace {

namespace fs = std::filesystem;

bool is_checkpoint(const fs::path& path) {
  return fs::exists(path / "manifest.json");
}

// Where the run in this folder keeps its checkpoints.
fs::path checkpoints_of(const fs::path& run) {
  const fs::path config = run / "config.json";
  if (fs::exists(run / "checkpoints" / "latest") || !fs::exists(config)) {
    return run / "checkpoints";
  }
  const std::string text = read_file(config.string());
  if (checkpoint::is_hugging_face_folder(run.string())) return {};
  return RunFolder(run_config_from_text(text, config.string())).checkpoints();
}

// The newest step-N of a run folder; "" where there is none.
fs::path newest_checkpoint(const fs::path& run) {
  const fs::path checkpoints = checkpoints_of(run);
  const fs::path latest = checkpoints / "latest";
  if (!fs::exists(latest)) return {};
  std::string name = read_file(latest.string());
  while (!name.empty() &&
         std::isspace(static_cast<unsigned char>(name.back()))) {
    name.pop_back();
  }
  return checkpoints / fs::path(name).filename();
}

// The run folder of RUN/checkpoints/step-N, where it keeps its tokenizer: above
// the checkpoint, or where the run's configuration has it.
fs::path run_folder_of(const fs::path& checkpoint, const RunConfig& run) {
  fs::path above =
      fs::absolute(checkpoint).lexically_normal().parent_path().parent_path();
  const RunFolder configured(run);
  const bool elsewhere = !fs::exists(above / "tokenizer.json") &&
                         fs::exists(configured.tokenizer());
  return elsewhere ? fs::path(configured.path()) : above;
}

models::HuggingFaceConfig described(const models::ModelConfig& model,
                                    c10::ScalarType dtype,
                                    const fs::path& tokenizer_folder) {
  models::HuggingFaceConfig config{.model = model, .dtype = dtype};
  if (fs::exists(tokenizer_folder / "tokenizer.json")) {
    const auto tokenizer = data::Tokenizer::load(tokenizer_folder.string());
    const auto end = tokenizer.end_of_text();
    config.bos_token = end;
    if (end) config.eos_tokens = {*end};
  }
  return config;
}

ModelSource source_of_checkpoint(const fs::path& path, c10::ScalarType dtype) {
  const auto manifest = checkpoint::read_manifest(path.string());
  const SavedRun saved = saved_run_from(manifest.extra, path.string());
  RunConfig run = run_config_from_text(saved.config, path.string());
  run.model.load_weights = false;  // the run did, once
  const std::string tokenizer_folder = run_folder_of(path, run).string();
  return {.path = path.string(),
          .is_checkpoint = true,
          .config = described(run.model, dtype, tokenizer_folder),
          .tokenizer_folder = tokenizer_folder};
}

// Weights of a run, of any type.
void load(const ModelSource& source, checkpoint::State state,
          comm::Group& world) {
  checkpoint::load(source.path, state, world,
                   {.partial = true, .convert = true});
}

std::shared_ptr<models::Model> open_checkpoint(const ModelSource& source) {
  auto decoder = models::make_model(source.config.model);
  nn::materialise(*decoder, {.dtype = source.config.dtype, .fill = false});
  checkpoint::State state;
  for (const auto& parameter : nn::parameters_of(*decoder)) {
    const auto& layout = parameter.spec->layout;
    const std::string name = "model." + parameter.name;
    state.tensors.push_back({.name = name,
                             .global_shape = layout.global_shape(),
                             .box = layout.local_box({}, {}),
                             .local = parameter.tensor.detach(),
                             .slices = nn::names_of_experts(name, layout)});
  }
  const auto alone = comm::make_communicator({});
  load(source, std::move(state), alone->world());
  return decoder;
}

}  // namespace

ModelSource find_trained_model(const std::string& path, c10::ScalarType dtype) {
  TS_CHECK_IO(fs::is_directory(path), path, ": there is no such folder.");
  if (is_checkpoint(path)) return source_of_checkpoint(path, dtype);
  if (const auto newest = newest_checkpoint(path); !newest.empty()) {
    return source_of_checkpoint(newest, dtype);
  }
  TS_CHECK_IO(checkpoint::is_hugging_face_folder(path), path,
              ": neither a checkpoint (manifest.json), nor a run folder with "
              "one (checkpoints/latest), nor a Hugging Face folder "
              "(config.json of a model).");
  ModelSource source{.path = path,
                     .config = models::read_hugging_face_config(path),
                     .tokenizer_folder = path};
  source.config.model.from = path;
  source.config.model.load_weights = true;
  return source;
}

std::shared_ptr<models::Model> open_whole(const ModelSource& source,
                                          c10::ScalarType dtype) {
  return source.is_checkpoint
             ? open_checkpoint(source)
             : checkpoint::model_from_hugging_face(source.path, dtype);
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
