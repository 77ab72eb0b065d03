#include "tessera/train/data_setup.h"

#include <filesystem>
#include <optional>

#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/data/file_list.h"
#include "tessera/data/token_stream.h"
#include "tessera/data/tokenizer_trainer.h"

namespace tessera::train {

using engine::RunConfig;

namespace {

bool is_text(const data::DataConfig& data, const std::string& path) {
  const std::string format =
      data.format == "auto" ? data::detect_format(path) : data.format;
  return format == "text" || format == "jsonl";
}

// Where the run's tokenizer is to be found; "": it must be trained.
std::string tokenizer_path(const RunConfig& config) {
  if (!config.data.tokenizer.empty()) return config.data.tokenizer;
  const std::string with_model = config.model.from + "/tokenizer.json";
  if (!config.model.from.empty() && std::filesystem::exists(with_model)) {
    return with_model;
  }
  return "";
}

void prepare_tokenizer(const RunConfig& config, const RunFolder& folder,
                       const std::vector<std::string>& train_files) {
  const std::string given = tokenizer_path(config);
  if (!given.empty()) {
    data::Tokenizer::load(given).save(folder.tokenizer());
    return;
  }
  if (std::filesystem::exists(folder.tokenizer())) return;
  log::info("training a tokenizer of ", config.model.vocab, " tokens on ",
            train_files.size(), " files");
  data::train_tokenizer_on_files(
      train_files,
      {.vocab_size = config.model.vocab, .threads = config.run.threads},
      {config.data.format, config.data.field})
      .save(folder.tokenizer());
}

data::TokenSource source_of(const RunConfig& config, const RunFolder& folder,
                            std::vector<std::string> paths,
                            const data::Tokenizer* tokenizer) {
  return {.paths = std::move(paths),
          .format = config.data.format,
          .field = config.data.field,
          .vocab_size = config.model.vocab,
          .tokenizer = tokenizer,
          .cache_folder = folder.tokens(),
          .threads = config.run.threads};
}

struct Files {
  std::vector<std::string> train, valid;  // valid may be empty
  bool train_is_text = false, valid_is_text = false;
  bool any_text() const { return train_is_text || valid_is_text; }
};

Files files_of(const data::DataConfig& data) {
  Files files;
  files.train = data::expand_paths(data.train, "data.train", data.exclude);
  files.train_is_text = is_text(data, files.train[0]);
  if (data.valid.empty()) return files;
  files.valid = data::expand_paths(data.valid, "data.valid", data.exclude);
  files.valid_is_text = is_text(data, files.valid[0]);
  return files;
}

}  // namespace

void prepare_data(const RunConfig& config, const RunFolder& folder) {
  const Files files = files_of(config.data);
  if (!files.any_text()) return;
  TS_CHECK_CONFIG(files.train_is_text || !tokenizer_path(config).empty(),
                  "data.valid is text (", files.valid[0],
                  "), but data.train is token files: set data.tokenizer to the "
                  "tokenizer.json that made them.");
  prepare_tokenizer(config, folder, files.train);
  const auto tokenizer = data::Tokenizer::load(folder.tokenizer());
  if (files.train_is_text) {
    prepare_tokens(source_of(config, folder, files.train, &tokenizer));
  }
  if (files.valid_is_text) {
    prepare_tokens(source_of(config, folder, files.valid, &tokenizer));
  }
}

Datasets open_datasets(const RunConfig& config, const RunFolder& folder) {
  const Files files = files_of(config.data);
  std::optional<data::Tokenizer> tokenizer;  // that prepare_data() left
  if (files.any_text()) tokenizer = data::Tokenizer::load(folder.tokenizer());
  const auto* encoder = tokenizer ? &*tokenizer : nullptr;
  Datasets sets;
  const auto open = [&](std::vector<std::string> paths, bool shuffle,
                        const std::string& key) {
    auto stream =
        open_tokens(source_of(config, folder, std::move(paths), encoder));
    const auto& seen = stream.fingerprints();
    sets.fingerprints.insert(sets.fingerprints.end(), seen.begin(), seen.end());
    return std::make_unique<data::Dataset>(
        std::move(stream),
        data::SamplerOptions{.seq_len = config.data.seq_len,
                             .global_batch = config.batch.global,
                             .shuffle = shuffle,
                             .seed = static_cast<uint64_t>(config.run.seed)},
        key);
  };
  sets.train = open(files.train, config.data.shuffle, "data.train");
  if (!files.valid.empty()) {
    sets.valid = open(files.valid, /*shuffle=*/false, "data.valid");
  }
  return sets;
}

}  // namespace tessera::train
