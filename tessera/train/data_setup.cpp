#include "tessera/train/data_setup.h"

#include <filesystem>
#include <optional>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/data/conversation.h"
#include "tessera/data/documents.h"
#include "tessera/data/file_list.h"
#include "tessera/data/token_stream.h"
#include "tessera/data/tokenizer_trainer.h"

namespace tessera::train {

using engine::RunConfig;

namespace {

bool is_text(const data::DataConfig& data, const std::string& path) {
  const std::string format =
      data.format == "auto" ? data::detect_format(path) : data.format;
  return format == "text" || format == "jsonl" || format == "chat";
}

bool is_chat(const data::DataConfig& data, const std::string& path) {
  if (data.format != "auto") return data.format == "chat";
  return data.field == "text" && data::is_json_lines(path) &&
         data::has_conversations(path, data.pair);
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

// For who talks to the model of this run: the template that it was trained
// with, and the special tokens that the template names.
void keep_chat_template(const RunConfig& config, const std::string& tokenizer,
                        const std::string& folder) {
  namespace fs = std::filesystem;
  const fs::path given(tokenizer);
  const fs::path from = fs::is_directory(given) ? given : given.parent_path();
  const auto keep = [&](const fs::path& file, const std::string& name) {
    if (!fs::exists(file)) return;
    write_file_atomic(fs::path(folder) / name, read_file(file));
  };
  keep(from / "tokenizer_config.json", "tokenizer_config.json");
  const std::string& chat_template = config.data.chat_template;
  const bool own = !chat_template.empty() && chat_template != "none";
  keep(own ? fs::path(chat_template) : from / "chat_template.jinja",
       "chat_template.jinja");
}

void prepare_tokenizer(const RunConfig& config, const RunFolder& folder,
                       const std::vector<std::string>& train_files) {
  const std::string given = tokenizer_path(config);
  if (!given.empty()) {
    data::Tokenizer::load(given).save(folder.tokenizer());
    keep_chat_template(config, given, folder.path());
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

data::ChatForm chat_form_of(const RunConfig& config) {
  return {.chat_template = config.data.chat_template,
          .pair = config.data.pair,
          .loss_on = config.data.loss_on,
          .packing = config.data.packing,
          .tokenizer = tokenizer_path(config),
          .seq_len = config.data.seq_len};
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
          .threads = config.run.threads,
          .chat = chat_form_of(config)};
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
  TS_CHECK_CONFIG(
      !tokenizer_path(config).empty() || !is_chat(config.data, files.train[0]),
      files.train[0],
      ": conversations need the tokenizer of the model: set model.from, or "
      "data.tokenizer.");
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
