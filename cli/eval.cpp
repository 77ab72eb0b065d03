// tessera eval: mean loss and perplexity of a model on text or token files.
#include <ATen/ATen.h>

#include <cmath>
#include <filesystem>
#include <iostream>

#include "cli/commands.h"
#include "cli/model_folder.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/data/file_list.h"
#include "tessera/data/token_stream.h"

namespace tessera::cli {
namespace {

struct EvalFlags {
  std::string model;
  std::vector<std::string> data;
  std::string format = "auto";
  std::string tokenizer;
  std::string dtype = "fp32";
  int64_t seq_len = 0;  // 0: max_seq, at most kSeqLen
  int64_t batch = 8;
};

constexpr int64_t kSeqLen = 1024;

struct Total {
  double sum = 0.0;
  double weight = 0.0;

  // `count` windows of `length` targets each, from token `first` on.
  void add(models::Model& decoder, const data::TokenStream& tokens,
           int64_t first, int64_t count, int64_t length) {
    const at::NoGradGuard no_grad;
    at::Tensor read = at::empty({count * length + 1}, at::kLong);
    tokens.read(first, {read.mutable_data_ptr<int64_t>(),
                        static_cast<size_t>(read.numel())});
    const auto window = [&](int64_t shift) {
      return read.narrow(0, shift, count * length).view({count, length});
    };
    const auto loss = decoder.loss(window(0), window(1));
    sum += loss.sum.item<double>();
    weight += loss.weight.item<double>();
  }
};

// Every token but the first is a target once; none sees beyond its window.
Total evaluate(models::Model& decoder, const data::TokenStream& tokens,
               int64_t seq_len, int64_t batch) {
  Total total;
  const int64_t targets = tokens.size() - 1;
  const int64_t windows = targets / seq_len;
  for (int64_t w = 0; w < windows; w += batch) {
    total.add(decoder, tokens, w * seq_len, std::min(batch, windows - w),
              seq_len);
  }
  const int64_t rest = targets - windows * seq_len;
  if (rest > 0) total.add(decoder, tokens, windows * seq_len, 1, rest);
  return total;
}

int64_t window_length(const EvalFlags& flags, int64_t max_seq) {
  const int64_t seq_len =
      flags.seq_len > 0 ? flags.seq_len : std::min(max_seq, kSeqLen);
  TS_CHECK_CONFIG(seq_len <= max_seq, "--seq-len ", seq_len,
                  " is longer than the model's max_seq ", max_seq, ".");
  return seq_len;
}

data::TokenStream open(const EvalFlags& flags, const train::TrainedModel& model,
                       const std::string& cache_folder) {
  data::TokenSource source{.paths = data::expand_paths(flags.data, "--data"),
                           .format = flags.format,
                           .vocab_size = model.decoder->config().vocab,
                           .cache_folder = cache_folder};
  std::optional<data::Tokenizer> tokenizer;
  const bool has_own =
      std::filesystem::exists(model.tokenizer_folder + "/tokenizer.json");
  if (!flags.tokenizer.empty() || has_own) {  // token files need none
    tokenizer = load_tokenizer(flags.tokenizer, model);
    source.tokenizer = &*tokenizer;
  }
  data::prepare_tokens(source);
  return data::open_tokens(source);
}

void run(const EvalFlags& flags) {
  const auto model = load_model(flags.model, flags.dtype);
  const int64_t seq_len = window_length(flags, model.decoder->config().max_seq);
  const TemporaryFolder cache("tessera-eval");
  const auto tokens = open(flags, model, cache.path().string());
  TS_CHECK_CONFIG(tokens.size() >= 2, "--data: ", tokens.size(),
                  " tokens leave nothing to predict.");
  log::info("evaluating ", tokens.size(), " tokens in windows of ", seq_len);
  const Total total = evaluate(*model.decoder, tokens, seq_len, flags.batch);
  const double loss = total.sum / total.weight;
  TS_CHECK(std::isfinite(loss), "eval: the loss is ", loss,
           ": weights or configuration of ", flags.model,
           " are no sound model.");
  const tessera::detail::Json result = {
      {"loss", loss},
      {"perplexity", std::exp(loss)},
      {"tokens", static_cast<int64_t>(total.weight)}};
  std::cout << result.dump() << std::endl;
}

}  // namespace

void add_eval(CLI::App& program) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App* command = program.add_subcommand(
      "eval", "Mean loss and perplexity, as JSON on the last line");
  command
      ->add_option("--model", flags->model,
                   "run folder, checkpoint or Hugging Face folder")
      ->required();
  command->add_option("--data", flags->data, "files, folders or globs")
      ->required();
  command
      ->add_option("--format", flags->format,
                   "auto, text, tokens_u16, tokens_u32, llmc or megatron")
      ->capture_default_str();
  command->add_option("--tokenizer", flags->tokenizer,
                      "tokenizer.json, where it is not the model's");
  command
      ->add_option("--seq-len", flags->seq_len,
                   "tokens that predict at most; 0: the model's max_seq, "
                   "at most 1024")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--batch", flags->batch, "sequences at a time")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--dtype", flags->dtype, "fp32, bf16 or fp64")
      ->capture_default_str();
  command->footer(
      "Example:\n"
      "  tessera eval --model runs/NAME --data book.txt");
  command->callback([flags] { run(*flags); });
}

}  // namespace tessera::cli
