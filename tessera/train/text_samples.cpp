#include "tessera/train/text_samples.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <ranges>
#include <span>
#include <string>
#include <utility>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/ignore_index.h"
#include "tessera/engine/generate.h"
#include "tessera/train/trained_model.h"

namespace tessera::train {

using engine::RunConfig;

namespace {

constexpr size_t kPromptTokens = 16;  // of text

data::Tokenizer tokenizer_for(const RunConfig& config,
                              const std::string& path) {
  TS_CHECK_CONFIG(!path.empty(), "monitor.sample is ", config.monitor.sample,
                  ", but the data is token files, and nothing tells what their "
                  "tokens mean. Set data.tokenizer to the tokenizer.json that "
                  "made them, or monitor.sample to 0.");
  return data::Tokenizer::load(path);
}

// Of monitor.sample_prompt.
std::vector<int64_t> prompt_given(const RunConfig& config,
                                  const data::Tokenizer& tokenizer) {
  auto ids =
      tokenizer.encode(config.monitor.sample_prompt, /*special_tokens=*/true);
  const auto length = static_cast<int64_t>(ids.size());
  TS_CHECK_CONFIG(length < config.data.seq_len, "monitor.sample_prompt has ",
                  length, " tokens and leaves no room in data.seq_len ",
                  config.data.seq_len, ". Nearest: ", config.data.seq_len - 1,
                  " tokens.");
  const int64_t highest = *std::ranges::max_element(ids);
  TS_CHECK_CONFIG(highest < config.model.vocab,
                  "monitor.sample_prompt has the token ", highest,
                  ", but model.vocab is ", config.model.vocab,
                  ". Is data.tokenizer the one that made the token files?");
  return ids;
}

// Of a sample. In one of conversations what comes before the first answer is
// not learned.
struct Beginning {
  std::vector<int64_t> prompt;
  std::vector<int64_t> answer = {};  // as far as it goes; of conversations
};

Beginning beginning_of(const data::Dataset& samples) {
  const data::Batch batch = samples.in_order(0, 1);
  const auto length = static_cast<size_t>(batch.inputs.size(1));
  const std::span ids(batch.inputs.const_data_ptr<int64_t>(), length);
  const std::span targets(batch.targets.const_data_ptr<int64_t>(), length);
  const auto counts = [](int64_t target) { return target != kIgnoreIndex; };
  const auto first = std::ranges::find_if(targets, counts);
  const auto before = static_cast<size_t>(first - targets.begin());
  const size_t end =
      std::min(before > 0 ? before + 1 : kPromptTokens, length - 1);
  // Where documents are kept apart, that of the last token alone.
  const auto begin =
      batch.document_starts.defined()
          ? batch.document_starts.const_data_ptr<int64_t>()[end - 1]
          : 0;
  Beginning found{
      .prompt = {ids.begin() + begin, ids.begin() + static_cast<int64_t>(end)}};
  if (before > 0) {
    found.answer = {first, std::find_if_not(first, targets.end(), counts)};
  }
  return found;
}

// What ends a text: for the tokenizer, for the model that training began with,
// and in a conversation the last token of an answer without a text of its own:
// it ends one, where an earlier one may begin one.
std::vector<int64_t> stops_of(const RunConfig& config,
                              const data::Tokenizer& tokenizer,
                              const Beginning& sample) {
  std::vector<int64_t> stops;
  if (checkpoint::is_hugging_face_folder(config.model.from)) {
    stops = stop_tokens(find_trained_model(config.model.from, at::kFloat));
  }
  if (const auto end = tokenizer.end_of_text()) stops.push_back(*end);
  for (const int64_t id : sample.answer | std::views::reverse) {
    if (!tokenizer.decode({&id, 1}).empty()) continue;
    stops.push_back(id);
    break;
  }
  return stops;
}

}  // namespace

void check_samples(const RunConfig& config, const std::string& tokenizer_path) {
  if (config.monitor.sample == 0) return;
  models::check_writes(config.model);
  TS_CHECK_CONFIG(config.data.seq_len > 1, "monitor.sample is ",
                  config.monitor.sample,
                  ", but data.seq_len 1 has no room for a text. Nearest: 2.");
  const data::Tokenizer tokenizer = tokenizer_for(config, tokenizer_path);
  if (!config.monitor.sample_prompt.empty()) prompt_given(config, tokenizer);
}

// A tokenizer may lie on each host by itself, and the data on some alone: what
// ranks draw together follows from what rank 0 has.
TextSamples::TextSamples(const RunConfig& config, const Datasets& data,
                         comm::Group& world)
    : config_(config) {
  if (world.rank() == 0) {
    tokenizer_ = tokenizer_for(config, data.tokenizer);
    const auto sample = beginning_of(data.valid ? *data.valid : *data.train);
    prompt_ = config.monitor.sample_prompt.empty()
                  ? sample.prompt
                  : prompt_given(config, *tokenizer_);
    stops_ = stops_of(config, *tokenizer_, sample);
    num_tokens_ = tokenizer_->vocab_size();
  }
  const auto agree = [&](std::vector<int64_t> numbers) {
    return comm::numbers_of_rank_0(world, std::move(numbers));
  };
  prompt_ = agree(prompt_);
  stops_ = agree(stops_);
  num_tokens_ = agree({num_tokens_})[0];
  const int64_t highest = *std::ranges::max_element(prompt_);
  TS_CHECK_CONFIG(highest < num_tokens_,
                  "monitor.sample: the data has the token ", highest,
                  ", but the tokenizer's ids are below ", num_tokens_,
                  ". Set data.tokenizer to the one that made the token files, "
                  "or monitor.sample to 0.");
}

monitor::Sample TextSamples::write(engine::RankModel& model,
                                   comm::Communicator& ranks,
                                   int64_t step) const {
  const auto start = std::chrono::steady_clock::now();
  models::GenerateOptions options{
      .max_new_tokens = config_.monitor.sample_tokens,
      .sampling = models::kUsualSampling,
      .seed = static_cast<uint64_t>(config_.run.seed),
      .sample = step,
      .num_tokens = num_tokens_,
      .stop_tokens = stops_};
  options.sampling.temperature = config_.monitor.sample_temperature;
  const auto tokens = engine::generate_by_evaluations(
      model, ranks, config_.data.seq_len, prompt_, options);
  std::vector<int64_t> whole = prompt_;
  whole.insert(whole.end(), tokens.begin(), tokens.end());
  const auto text_of = [this](const std::vector<int64_t>& ids) {
    return tokenizer_ ? tokenizer_->decode(ids, /*special_tokens=*/true) : "";
  };
  const std::string prompt = text_of(prompt_), text = text_of(whole);
  // A character may begin in the prompt's last token.
  const bool splits = text.starts_with(prompt);
  return {.prompt = prompt,
          .text = splits ? text.substr(prompt.size()) : text_of(tokens),
          .tokens = static_cast<int64_t>(tokens.size()),
          .seconds = std::chrono::duration<double>(
                         std::chrono::steady_clock::now() - start)
                         .count()};
}

}  // namespace tessera::train
