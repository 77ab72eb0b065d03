#include "tessera/train/data_setup.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <optional>

#include "tessera/checkpoint/local_place.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/hash.h"
#include "tessera/core/log.h"
#include "tessera/data/file_list.h"
#include "tessera/data/mixture.h"
#include "tessera/data/token_stream.h"
#include "tessera/data/tokenizer_trainer.h"
#include "tessera/engine/reader.h"
#include "tessera/train/resumed_run.h"
#include "tessera/train/trained_model.h"

namespace tessera::train {

using engine::RunConfig;

namespace {

// Of the tokenizer that the configuration names; "": it names none.
std::string tokenizer_path(const RunConfig& config) {
  if (!config.data.tokenizer.empty()) return config.data.tokenizer;
  if (config.model.from.empty()) return "";
  const auto model = find_trained_model(config.model.from, at::kFloat);
  const std::string with_model = model.tokenizer_folder + "/tokenizer.json";
  return std::filesystem::exists(with_model) ? with_model : "";
}

// Whether the run goes on from a checkpoint of its own.
bool goes_on(const RunConfig& config, const RunFolder& folder,
             const std::string& resume) {
  if (resume == "auto") {
    return checkpoint::has_checkpoints(folder.checkpoints()) ||
           (config.checkpoint.saves_locally() &&
            checkpoint::has_local_checkpoints(folder.checkpoints()));
  }
  return checkpoint::is_checkpoint_in(folder.checkpoints(), resume);
}

// The tokenizer that the checkpoint was trained with which the run goes on
// from; "": it begins anew. What a run left that never saved may be of other
// text, or other keys.
std::string resumed_tokenizer(const RunConfig& config, const RunFolder& folder,
                              const std::string& resume) {
  if (goes_on(config, folder, resume) &&
      std::filesystem::exists(folder.tokenizer())) {
    return folder.tokenizer();
  }
  const std::string checkpoint = resumed_folder(resume, folder.checkpoints());
  if (checkpoint.empty()) return "";
  const auto model = find_trained_model(checkpoint, at::kFloat);
  std::string theirs = model.tokenizer_folder + "/tokenizer.json";
  TS_CHECK_CONFIG(std::filesystem::exists(theirs),
                  "data.tokenizer is empty, and the run goes on from ",
                  checkpoint,
                  ", whose weights know the ids of one tokenizer: ", theirs,
                  " is not there, and a new one would give the text other "
                  "ids. Set data.tokenizer to the one that it was trained "
                  "with.");
  return theirs;
}

// Among the tokens of all runs, by what it is learned from: every rank that
// reads finds it there.
std::string learned_tokenizer(const RunConfig& config, const RunFolder& folder,
                              const std::vector<std::string>& files) {
  std::string text = c10::str(config.model.vocab, ' ', config.data.format, ' ',
                              config.data.field);
  for (const std::string& path : files) {
    const auto file = data::fingerprint_of(MappedFile(path));
    text += c10::str(' ', std::filesystem::path(path).filename().string(), ' ',
                     file.bytes, ' ', file.xxh3);
  }
  return folder.tokens() + "/tokenizer-" + to_hex(hash128(text)) + ".json";
}

void learn_tokenizer(const RunConfig& config,
                     const std::vector<std::string>& files,
                     const std::string& path) {
  log::info("training a tokenizer of ", config.model.vocab, " tokens on ",
            files.size(), files.size() == 1 ? " file" : " files");
  data::train_tokenizer_on_files(
      files, {.vocab_size = config.model.vocab, .threads = config.run.threads},
      {config.data.format, config.data.field})
      .save(path);
}

data::ChatForm chat_form_of(const RunConfig& config) {
  return {.chat_template = config.data.chat_template,
          .pair = config.data.pair,
          .loss_on = config.data.loss_on,
          .packing = config.data.packing,
          .tokenizer = tokenizer_path(config),
          .seq_len = config.data.seq_len};
}

// One set of files, with a weight where there are several.
struct Named {
  std::string name;  // "data.train"
  data::TokenSource tokens;
  double weight = 1;
  bool is_text = false;
  int64_t num_tokens = 0;  // once it is prepared
};

struct Inputs {
  std::vector<Named> train;
  std::vector<Named> valid;  // none or one
};

// What the configuration says of one: no file is looked at.
struct Entry {
  std::string name;  // "data.train 'a.txt'"
  std::string key;
  std::vector<std::string> paths;
  double weight = 1;
};

std::vector<Entry> train_entries(const RunConfig& config) {
  const data::DataConfig& data = config.data;
  if (data.weights.empty()) return {{"data.train", "data.train", data.train}};
  std::vector<Entry> entries;
  for (size_t i = 0; i < data.weights.size(); ++i) {
    // What is never taken need not be whole.
    if (data.weights[i] == 0) continue;
    entries.push_back({.name = c10::str("data.train '", data.train[i], "'"),
                       .key = "data.train",
                       .paths = {data.train[i]},
                       .weight = data.weights[i]});
  }
  return entries;
}

std::vector<Entry> valid_entries(const RunConfig& config) {
  const data::DataConfig& data = config.data;
  if (data.valid.empty()) return {};
  return {{"data.valid", "data.valid", data.valid}};
}

Named named_source(const RunConfig& config, const RunFolder& folder,
                   const Entry& entry) {
  const data::DataConfig& data = config.data;
  Named source = {.name = entry.name,
                  .tokens = {.paths = data::expand_paths(entry.paths, entry.key,
                                                         data.exclude),
                             .format = data.format,
                             .field = data.field,
                             .vocab_size = config.model.vocab,
                             .cache_folder = folder.tokens(),
                             .threads = config.run.threads,
                             .chat = chat_form_of(config),
                             .documents_apart = data.intra_document_masking},
                  .weight = entry.weight};
  source.is_text = is_text(source.tokens);
  return source;
}

Inputs inputs_of(const RunConfig& config, const RunFolder& folder) {
  Inputs inputs;
  for (const Entry& entry : train_entries(config)) {
    inputs.train.push_back(named_source(config, folder, entry));
  }
  for (const Entry& entry : valid_entries(config)) {
    inputs.valid.push_back(named_source(config, folder, entry));
  }
  return inputs;
}

std::vector<Named*> all_of(Inputs& inputs) {
  std::vector<Named*> all;
  for (Named& source : inputs.train) all.push_back(&source);
  for (Named& source : inputs.valid) all.push_back(&source);
  return all;
}

bool any_text(const std::vector<Named*>& sources) {
  return std::ranges::any_of(
      sources, [](const Named* source) { return source->is_text; });
}

// REQUIRES: it is there, where there is one.
std::optional<data::Tokenizer> load_tokenizer(const std::string& path) {
  if (path.empty()) return std::nullopt;
  return data::Tokenizer::load(path);
}

// The files of text to learn a vocabulary from. Tokens were made by a tokenizer
// that only the user knows.
std::vector<std::string> files_to_learn_from(const RunConfig& config,
                                             const Inputs& inputs) {
  std::vector<std::string> files;
  for (const Named& source : inputs.train) {
    if (source.is_text) {
      TS_CHECK_CONFIG(
          !tokenizer_path(config).empty() || !is_chat(source.tokens),
          source.tokens.paths[0],
          ": conversations need the tokenizer of the model: set model.from, or "
          "data.tokenizer.");
      files.insert(files.end(), source.tokens.paths.begin(),
                   source.tokens.paths.end());
    } else {
      TS_CHECK_CONFIG(!tokenizer_path(config).empty(), "there is text beside ",
                      source.name, ", which is token files (",
                      source.tokens.paths[0],
                      "): set data.tokenizer to the tokenizer.json that made "
                      "them.");
    }
  }
  return files;
}

// Where the run's tokenizer lies until keep_tokenizer(): a start that is
// refused, or kept out by the lock, leaves the run's own as it was.
struct TokenizerPlace {
  std::string path = "";                     // "": there is none
  std::vector<std::string> learned_of = {};  // none: it is there already
};

// Of token files it is kept for who reads what the model writes.
TokenizerPlace place_of_tokenizer(const RunConfig& config,
                                  const RunFolder& folder,
                                  const std::string& resume, Inputs& inputs) {
  std::string given = tokenizer_path(config);
  if (!given.empty() || !any_text(all_of(inputs))) {
    return {.path = std::move(given)};
  }
  auto files = files_to_learn_from(config, inputs);
  std::string resumed = resumed_tokenizer(config, folder, resume);
  if (!resumed.empty()) return {.path = std::move(resumed)};
  std::string learned = learned_tokenizer(config, folder, files);
  return {.path = std::move(learned), .learned_of = std::move(files)};
}

// Before ranks start, as far as the sizes of files tell.
std::vector<int64_t> sizes_of(const RunConfig& config,
                              const std::vector<Named>& sources) {
  std::vector<int64_t> sizes;
  for (const Named& source : sources) {
    sizes.push_back(
        data::samples_in(source.num_tokens, config.data.seq_len, source.name));
  }
  return sizes;
}

void check_sizes(const RunConfig& config, const Inputs& inputs) {
  data::hold_out(sizes_of(config, inputs.train), config.data.valid_share);
  sizes_of(config, inputs.valid);
}

data::SamplerOptions sampler_options(const RunConfig& config, bool shuffle) {
  return {.seq_len = config.data.seq_len,
          .global_batch = config.batch.global,
          .shuffle = shuffle,
          .seed = static_cast<uint64_t>(config.run.seed),
          .skips = config.data.skips(config.batch.global)};
}

// What each source has, and what is taken of it.
void tell(const RunConfig& config, const std::vector<data::Source>& sources) {
  std::vector<double> weights;
  for (const auto& source : sources) weights.push_back(source.weight);
  const data::Mixture mixture(weights);
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (!config.data.weights.empty() && std::abs(sum - 1) > 1e-9) {
    log::info("data.weights sum to ", sum, ": taken as parts of that");
  }
  std::vector<int64_t> sizes;
  for (const auto& source : sources) {
    sizes.push_back(data::samples_in(source.tokens->size(), config.data.seq_len,
                                     source.name));
  }
  const auto parts = data::hold_out(sizes, config.data.valid_share);
  for (size_t i = 0; i < sources.size(); ++i) {
    const data::TokenFile& file = sources[i].tokens->files()[0];
    if (file.format() == "cache") {
      log::info(sources[i].name, ": the tokens are in ", file.path());
    }
    const int64_t held = parts[i].num_held();
    log::info(sources[i].name, ": ", sources[i].tokens->size(), " tokens, ",
              sizes[i], " samples",
              held > 0 ? c10::str(", ", held, " of them held out") : "",
              sources.size() > 1
                  ? c10::str("; ", 100 * mixture.share(i), "% of what is taken")
                  : "");
  }
}

void warn_of_idle_keys(const RunConfig& config,
                       const std::vector<Named*>& sources) {
  const auto is_chats = [](const Named* source) {
    return source->is_text && is_chat(source->tokens);
  };
  const auto chats = std::ranges::count_if(sources, is_chats);
  if (config.data.packing && chats == 0) {
    log::warning(
        "data.packing has no effect: it packs conversations, and there are "
        "none. Documents of text are always packed; what keeps them apart is "
        "data.intra_document_masking");
  }
  if (config.data.intra_document_masking && chats == std::ssize(sources)) {
    log::warning(
        "data.intra_document_masking has no effect: conversations have a row "
        "each, or, with data.packing, are kept apart in any case");
  }
}

}  // namespace

std::string prepare_data(const RunConfig& config, const RunFolder& folder,
                         const std::string& resume) {
  Inputs inputs = inputs_of(config, folder);
  const auto all = all_of(inputs);
  warn_of_idle_keys(config, all);
  TokenizerPlace place = place_of_tokenizer(config, folder, resume, inputs);
  if (!place.learned_of.empty()) {
    learn_tokenizer(config, place.learned_of, place.path);
  }
  const auto tokenizer = load_tokenizer(place.path);
  for (Named* source : all) {
    source->tokens.tokenizer = tokenizer ? &*tokenizer : nullptr;
    source->num_tokens = prepare_tokens(source->tokens);
  }
  check_sizes(config, inputs);
  return std::move(place.path);
}

void keep_tokenizer(const RunConfig& config, const std::string& path,
                    const RunFolder& folder) {
  namespace fs = std::filesystem;
  if (path.empty()) return;
  const auto keep = [](const std::string& text, const fs::path& kept) {
    const bool is_there = fs::exists(kept) && read_file(kept) == text;
    if (!is_there) write_file_atomic(kept, text);
  };
  const fs::path run(folder.path());
  if (path != folder.tokenizer()) {
    keep(data::Tokenizer::load(path).to_json(), folder.tokenizer());
  }
  const auto keep_beside = [&](const fs::path& file, const char* name) {
    if (fs::exists(file)) {
      keep(read_file(file), run / name);
    } else {
      fs::remove(run / name);  // of an earlier tokenizer
    }
  };
  const fs::path at(path);
  const fs::path from = fs::is_directory(at) ? at : at.parent_path();
  keep_beside(from / "tokenizer_config.json", "tokenizer_config.json");
  const std::string& own = config.data.chat_template;
  keep_beside(own.empty() || own == "none" ? from / "chat_template.jinja"
                                           : fs::path(own),
              "chat_template.jinja");
}

namespace {

struct Opened {
  std::vector<data::Source> train, valid;
  // Of the first ones, then of the others.
  std::vector<data::FileFingerprint> fingerprints = {};
  size_t num_of_train = 0;  // of these
  std::string tokenizer = "";
};

Opened open_sources(const RunConfig& config, const RunFolder& folder,
                    const std::string& resume) {
  Inputs inputs = inputs_of(config, folder);
  Opened opened;
  opened.tokenizer = place_of_tokenizer(config, folder, resume, inputs).path;
  // Of token files, who keeps documents apart has to know what ends one.
  const bool asks =
      config.data.intra_document_masking || any_text(all_of(inputs));
  const auto tokenizer = load_tokenizer(asks ? opened.tokenizer : "");
  const auto open = [&](std::vector<Named>& named) {
    std::vector<data::Source> sources;
    for (Named& source : named) {
      source.tokens.tokenizer = tokenizer ? &*tokenizer : nullptr;
      auto stream =
          std::make_shared<const data::TokenStream>(open_tokens(source.tokens));
      const auto& seen = stream->fingerprints();
      opened.fingerprints.insert(opened.fingerprints.end(), seen.begin(),
                                 seen.end());
      sources.push_back({source.name, std::move(stream), source.weight});
    }
    return sources;
  };
  opened.train = open(inputs.train);
  opened.num_of_train = opened.fingerprints.size();
  opened.valid = open(inputs.valid);
  return opened;
}

// Of a rank that another one reads for.
Opened unread_sources(const RunConfig& config) {
  const auto named = [](const std::vector<Entry>& entries) {
    std::vector<data::Source> sources;
    for (const Entry& entry : entries) {
      sources.push_back({entry.name, nullptr, entry.weight});
    }
    return sources;
  };
  return {.train = named(train_entries(config)),
          .valid = named(valid_entries(config))};
}

std::vector<data::FileFingerprint> caches_of(
    const std::vector<data::Source>& sources) {
  std::vector<data::FileFingerprint> all;
  for (const data::Source& source : sources) {
    if (source.tokens == nullptr) continue;
    const auto caches = source.tokens->caches();
    all.insert(all.end(), caches.begin(), caches.end());
  }
  return all;
}

// TS_CHECK_IO where two that read have other files, or other tokens of them.
void compare_data(const Opened& opened, comm::Group& world, bool reads) {
  data::compare_across(world, opened.fingerprints, reads);
  auto caches = caches_of(opened.train);
  const auto of_valid = caches_of(opened.valid);
  caches.insert(caches.end(), of_valid.begin(), of_valid.end());
  data::compare_caches_across(world, caches, reads);
}

// As rank 0 has them, who always reads.
void share_sizes(Opened& opened, comm::Group& world) {
  std::vector<int64_t> sizes;
  for (const auto* sources : {&opened.train, &opened.valid}) {
    for (const data::Source& source : *sources) sizes.push_back(source.size());
  }
  sizes = comm::numbers_of_rank_0(world, std::move(sizes));
  auto next = sizes.begin();
  for (auto* sources : {&opened.train, &opened.valid}) {
    for (data::Source& source : *sources) source.num_tokens = *next++;
  }
}

}  // namespace

Datasets open_datasets(const RunConfig& config, const RunFolder& folder,
                       const std::string& resume, comm::Group& world) {
  Datasets sets;
  const int64_t reader = engine::reader_of(config, world.rank());
  sets.reads = reader == world.rank();
  Opened opened = unread_sources(config);
  comm::on_all(world, "opening the data", [&] {
    if (sets.reads) opened = open_sources(config, folder, resume);
  });
  compare_data(opened, world, sets.reads);
  if (engine::reads_for_others(config)) share_sizes(opened, world);
  opened.fingerprints.resize(opened.num_of_train);
  sets.fingerprints = std::move(opened.fingerprints);
  sets.caches = caches_of(opened.train);
  sets.tokenizer = std::move(opened.tokenizer);
  const double share = config.data.valid_share;
  sets.train = std::make_unique<data::Dataset>(
      opened.train, sampler_options(config, config.data.shuffle),
      data::Held{share, data::Part::kKept});
  if (sets.reads) {
    tell(config, opened.train);
  } else {
    log::info("the samples are read by rank ", reader);
  }
  if (share > 0) {
    sets.valid = std::make_unique<data::Dataset>(
        opened.train, sampler_options(config, /*shuffle=*/false),
        data::Held{share, data::Part::kHeldOut});
  } else if (!opened.valid.empty()) {
    sets.valid = std::make_unique<data::Dataset>(
        std::move(opened.valid), sampler_options(config, /*shuffle=*/false));
  }
  return sets;
}

}  // namespace tessera::train
