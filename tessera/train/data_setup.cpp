#include "tessera/train/data_setup.h"

#include <filesystem>
#include <optional>

#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/data/file_list.h"
#include "tessera/data/token_stream.h"
#include "tessera/data/tokenizer_trainer.h"

namespace tessera::train {
namespace {

bool is_text(const data::DataConfig& data, const std::string& path) {
  const std::string format =
      data.format == "auto" ? data::detect_format(path) : data.format;
  return format == "text";
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
  data::train_tokenizer_on_files(train_files, {.vocab_size = config.model.vocab,
                                               .threads = config.run.threads})
      .save(folder.tokenizer());
}

data::TokenSource source_of(const RunConfig& config, const RunFolder& folder,
                            std::vector<std::string> paths,
                            const data::Tokenizer* tokenizer) {
  return {.paths = std::move(paths),
          .format = config.data.format,
          .vocab_size = config.model.vocab,
          .tokenizer = tokenizer,
          .cache_folder = folder.tokens(),
          .threads = config.run.threads};
}

// The tokenizer that prepare_data() left in the run folder, for text.
std::optional<data::Tokenizer> open_tokenizer(const RunConfig& config,
                                              const RunFolder& folder,
                                              const std::string& a_file) {
  if (!is_text(config.data, a_file)) return std::nullopt;
  return data::Tokenizer::load(folder.tokenizer());
}

std::vector<std::string> valid_files(const RunConfig& config) {
  if (config.data.valid.empty()) return {};
  return data::expand_paths(config.data.valid, "data.valid");
}

}  // namespace

void prepare_data(const RunConfig& config, const RunFolder& folder) {
  const auto train = data::expand_paths(config.data.train, "data.train");
  if (!is_text(config.data, train[0])) return;
  prepare_tokenizer(config, folder, train);
  const auto tokenizer = open_tokenizer(config, folder, train[0]);
  prepare_tokens(source_of(config, folder, train, &*tokenizer));
  if (auto valid = valid_files(config); !valid.empty()) {
    prepare_tokens(source_of(config, folder, std::move(valid), &*tokenizer));
  }
}

Datasets open_datasets(const RunConfig& config, const RunFolder& folder) {
  const auto train = data::expand_paths(config.data.train, "data.train");
  const auto tokenizer = open_tokenizer(config, folder, train[0]);
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
  sets.train = open(train, config.data.shuffle, "data.train");
  if (auto valid = valid_files(config); !valid.empty()) {
    sets.valid = open(std::move(valid), /*shuffle=*/false, "data.valid");
  }
  return sets;
}

}  // namespace tessera::train
