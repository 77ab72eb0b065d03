#include "cli/model_folder.h"

#include <algorithm>
#include <map>

#include "cli/overrides.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/train/memory_check.h"

namespace tessera::cli {
at::ScalarType dtype_of(const std::string& word) {
  static const std::map<std::string, at::ScalarType> known = {
      {"fp64", at::kDouble},
      {"fp32", at::kFloat},
      {"bf16", at::kBFloat16},
      {"fp16", at::kHalf}};
  const auto found = known.find(word);
  TS_CHECK_USAGE(found != known.end(), "--dtype \"", word,
                 "\": expected fp32, bf16, fp16 or fp64.");
  return found->second;
}

train::ModelSource find_model(const std::string& path, const std::string& dtype,
                              bool averaged) {
  auto source = train::find_trained_model(path, dtype_of(dtype));
  if (averaged) train::read_averages(source);
  return source;
}

data::Tokenizer load_tokenizer(const std::string& path,
                               const train::ModelSource& model) {
  const std::string place = path.empty() ? model.tokenizer_folder : path;
  auto tokenizer = data::Tokenizer::load(place);
  TS_CHECK_CONFIG(tokenizer.vocab_size() <= model.config.model.vocab,
                  "the tokenizer of ", place, " has ", tokenizer.vocab_size(),
                  " tokens and the model knows ", model.config.model.vocab,
                  ": they do not belong together.");
  return tokenizer;
}

engine::RunConfig mesh_config(const train::ModelSource& model,
                              const std::string& dtype,
                              const std::vector<std::string>& extras,
                              const std::vector<std::string>& keys) {
  const auto overrides = overrides_of({}, extras);
  auto config =
      engine::run_config_from_text("{}", "the command line", overrides);
  for (const auto& each : overrides) {
    TS_CHECK_CONFIG(std::ranges::count(keys, each.key) > 0, each.flag,
                    ": this command does not use ", each.key,
                    ". Of the configuration it takes ",
                    some_of(keys, keys.size()), ".");
  }
  config.model = model.config.model;
  config.precision.compute = dtype;
  return config;
}

std::vector<std::string> keys_of_placement(
    const std::vector<std::string>& of_strategies) {
  auto keys = mesh::keys_of_degrees();
  keys.insert(keys.begin(), "run.device");
  keys.emplace_back("mesh.order");
  keys.insert(keys.end(), of_strategies.begin(), of_strategies.end());
  keys.insert(keys.end(), {"comm.backend", "comm.algorithm", "comm.timeout_s",
                           "comm.silence_s"});
  return keys;
}

void with_model(const train::ModelSource& source,
                const engine::RunConfig& config, comm::Communicator& ranks,
                const std::function<void(engine::RankModel&)>& use) {
  try {
    const auto model = train::open_for_evaluation(source, config, ranks);
    use(*model);
  } catch (const c10::OutOfMemoryError& error) {
    train::refuse_out_of_memory(config, error, program::Purpose::kEvaluation);
  }
}

int64_t world_of(const engine::RunConfig& config, const RankFlags& flags,
                 const launch::RankEnvironment& place) {
  if (place.source != "none") return place.world_size;
  return flags.nproc > 0 ? flags.nproc : engine::implied_world_size(config);
}

}  // namespace tessera::cli
