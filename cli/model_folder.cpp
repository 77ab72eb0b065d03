#include "cli/model_folder.h"

#include <map>

#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

at::ScalarType dtype_of(const std::string& word) {
  static const std::map<std::string, at::ScalarType> known = {
      {"fp64", at::kDouble}, {"fp32", at::kFloat}, {"bf16", at::kBFloat16}};
  const auto found = known.find(word);
  TS_CHECK_USAGE(found != known.end(), "--dtype \"", word,
                 "\": expected fp32, bf16 or fp64.");
  return found->second;
}

}  // namespace

train::TrainedModel load_model(const std::string& path,
                               const std::string& dtype) {
  return train::open_trained_model(path, dtype_of(dtype));
}

data::Tokenizer load_tokenizer(const std::string& path,
                               const train::TrainedModel& model) {
  const std::string place = path.empty() ? model.tokenizer_folder : path;
  auto tokenizer = data::Tokenizer::load(place);
  TS_CHECK_CONFIG(tokenizer.vocab_size() <= model.decoder->config().vocab,
                  "the tokenizer of ", place, " has ", tokenizer.vocab_size(),
                  " tokens and the model knows ", model.decoder->config().vocab,
                  ": they do not belong together.");
  return tokenizer;
}

}  // namespace tessera::cli
