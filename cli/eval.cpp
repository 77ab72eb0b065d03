// tessera eval: mean loss and perplexity of a model on text or token files.
#include <array>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <set>

#include "cli/commands.h"
#include "cli/flag_values.h"
#include "cli/flags_for_keys.h"
#include "cli/model_folder.h"
#include "cli/overrides.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/data/file_list.h"
#include "tessera/data/fingerprint.h"
#include "tessera/data/token_stream.h"
#include "tessera/data/windows.h"
#include "tessera/engine/run_devices.h"
#include "tessera/train/evaluate.h"
#include "tessera/train/memory_check.h"

namespace tessera::cli {

using engine::RunConfig;

namespace {

struct EvalFlags {
  std::string model;
  std::vector<std::string> data;
  std::vector<std::string> exclude;
  std::string format = "auto";
  std::string field;  // "": the run's
  std::string tokenizer;
  std::string cache;
  std::string dtype = "fp32";
  int64_t seq_len = 0;  // 0: max_seq, at most kSeqLen
  int64_t batch = 8;
  bool averaged = false;
  RankFlags ranks;
};

constexpr int64_t kSeqLen = 1024;

int64_t window_length(const EvalFlags& flags, int64_t max_seq) {
  const int64_t seq_len =
      flags.seq_len > 0 ? flags.seq_len : std::min(max_seq, kSeqLen);
  TS_CHECK_CONFIG(seq_len <= max_seq, "--seq-len ", seq_len,
                  " is longer than the model's max_seq ", max_seq, ".");
  return seq_len;
}

// Of how data is read, what may be otherwise than the run had it.
constexpr std::array kKeysOfData = {"data.chat_template", "data.pair",
                                    "data.loss_on",
                                    "data.intra_document_masking"};

// As the run had it, but for what the command line says.
void take_data(const data::DataConfig& of_run,
               const std::vector<std::string>& extras, data::DataConfig& data) {
  std::set<std::string> said;
  for (const auto& each : overrides_of({}, extras)) said.insert(each.key);
  const auto take = [&](const char* key, auto& ours, const auto& theirs) {
    if (!said.contains(key)) ours = theirs;
  };
  // A template of its own lies in the run's folder by now.
  take("data.chat_template", data.chat_template,
       of_run.chat_template == "none" ? "none" : "");
  take("data.pair", data.pair, of_run.pair);
  take("data.loss_on", data.loss_on, of_run.loss_on);
  take("data.field", data.field, of_run.field);
  take("data.intra_document_masking", data.intra_document_masking,
       of_run.intra_document_masking);
}

data::TokenStream open(const EvalFlags& flags, const train::ModelSource& model,
                       const data::DataConfig& data,
                       const std::string& cache_folder) {
  data::TokenSource source{
      .paths = data::expand_paths(flags.data, "--data", flags.exclude),
      .format = flags.format,
      .vocab_size = model.config.model.vocab,
      .cache_folder = cache_folder};
  source.chat.tokenizer =
      flags.tokenizer.empty() ? model.tokenizer_folder : flags.tokenizer;
  source.chat.seq_len = data.seq_len;
  source.chat.chat_template = data.chat_template;
  source.chat.pair = data.pair;
  source.chat.loss_on = data.loss_on;
  source.field = flags.field.empty() ? data.field : flags.field;
  source.documents_apart = data.intra_document_masking;
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

std::vector<std::string> keys_of_evaluation() {
  auto keys = keys_of_placement(RunConfig::keys_of_evaluation());
  keys.insert(keys.end(), kKeysOfData.begin(), kKeysOfData.end());
  return keys;
}

class EvalCommand {
 public:
  EvalCommand(const EvalFlags& flags, const std::vector<std::string>& extras)
      : flags_(flags),
        source_(find_model(flags.model, flags.dtype, flags.averaged)),
        config_(
            mesh_config(source_, flags.dtype, extras, keys_of_evaluation())) {
    take_data(source_.data, extras, config_.data);
    config_.data.seq_len = window_length(flags, config_.model.max_seq);
    config_.batch.micro = flags.batch;
  }

  int run(int argc, char** argv) {
    const auto place = find_place(flags_.ranks);
    const int64_t world_size = world_of(config_, flags_.ranks, place);
    engine::complete_for_evaluation(config_, world_size);
    RankJob job{.comm = config_.comm,
                .devices = engine::devices_of_ranks(config_, world_size),
                .work =
                    [this](comm::Communicator& ranks) {
                      evaluate(ranks);
                      return static_cast<int>(ExitCode::kOk);
                    },
                .arguments = {argv, argv + argc}};
    // The checkpoint that is the newest now, for all ranks that are started.
    replace_flag(job.arguments, "--model", source_.path);
    if (flags_.cache.empty()) {
      own_cache_ = std::make_unique<TemporaryFolder>("tessera-eval");
      flags_.cache = own_cache_->path().string();
      job.arguments.insert(job.arguments.end(), {"--cache", flags_.cache});
      job.tidy = [this] { own_cache_.reset(); };
    }
    job.prepare = [this](const launch::RankEnvironment& first) {
      train::check_memory(config_, {first.rank, first.local_world_size},
                          train::memory_of_host(),
                          program::Purpose::kEvaluation);
      tokens();
    };
    return run_ranks(job, flags_.ranks, place, world_size);
  }

 private:
  data::TokenStream tokens() const {
    auto tokens = open(flags_, source_, config_.data, flags_.cache);
    TS_CHECK_CONFIG(tokens.size() >= 2, "--data: ", tokens.size(),
                    " tokens leave nothing to predict.");
    return tokens;
  }

  void evaluate(comm::Communicator& ranks) const {
    const auto tokens = this->tokens();
    data::compare_across(ranks.world(), tokens.fingerprints());
    data::compare_caches_across(ranks.world(), tokens.caches());
    const int64_t seq_len = config_.data.seq_len;
    train::MeanLoss mean;
    with_model(source_, config_, ranks, [&](engine::RankModel& model) {
      log::info("evaluating ", tokens.size(), " tokens in windows of ",
                seq_len);
      const bool cut =
          parallel::local_length(seq_len, model.mesh()) < seq_len ||
          config_.tensor.sequence_parallel;
      const data::Windows windows(tokens, seq_len, flags_.batch, cut);
      mean = train::mean_loss(
          [&](const data::Batch& batch) { return model.evaluate(batch); },
          {.count = windows.count(),
           .read = [&](int64_t index) { return windows.read(index); }},
          *model.composed().data, ranks.world());
    });
    TS_CHECK(std::isfinite(mean.loss), "eval: the loss is ", mean.loss,
             ": weights or configuration of ", flags_.model,
             " are no sound model.");
    if (ranks.rank() > 0) return;
    const tessera::detail::Json result = {{"loss", mean.loss},
                                          {"perplexity", std::exp(mean.loss)},
                                          {"tokens", mean.tokens}};
    std::cout << result.dump() << std::endl;
  }

  EvalFlags flags_;
  const train::ModelSource source_;
  RunConfig config_;
  std::unique_ptr<TemporaryFolder> own_cache_;
};

}  // namespace

void add_eval(CLI::App& program, int argc, char** argv) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App* command = program.add_subcommand(
      "eval", "Mean loss and perplexity, as JSON on the last line");
  command
      ->add_option("--model", flags->model,
                   "run folder, checkpoint or Hugging Face folder")
      ->required();
  command->add_option("--data", flags->data, "files, folders or globs")
      ->required();
  command->add_option("--exclude", flags->exclude,
                      "what to leave out of them: globs, as data.exclude");
  command->add_option("--field", flags->field,
                      "of a record of JSON: where its text is; else as "
                      "the run has it");
  command
      ->add_option("--format", flags->format,
                   "auto, text, jsonl, chat, tokens_u16, tokens_u32, llmc or "
                   "megatron")
      ->capture_default_str();
  command->add_option("--tokenizer", flags->tokenizer,
                      "tokenizer.json, where it is not the model's");
  command
      ->add_option("--seq-len", flags->seq_len,
                   "tokens that predict at most; 0: the model's max_seq, "
                   "at most 1024")
      ->check(whole_number(0, models::kMaxSize));
  command->add_option("--batch", flags->batch, "sequences at a time")
      ->capture_default_str()
      ->check(whole_number(1, models::kMaxSize));
  command->add_option("--dtype", flags->dtype, "fp32, bf16, fp16 or fp64")
      ->capture_default_str();
  command->add_option("--cache", flags->cache,
                      "folder that keeps text as tokens, for ranks to share; "
                      "else a temporary one");
  command->add_flag("--ema", flags->averaged,
                    "the averages of the weights (optimizer.ema)");
  add_rank_flags(*command, flags->ranks);
  take_keys(*command, keys_of_evaluation());
  command->footer(
      "Where the ranks are, what they compute on and how they talk, are keys "
      "of the\nconfiguration: run.device, mesh.*, zero.*, tensor.*, "
      "context.*, pipeline.split, comm.*.\nSo is what of the data counts: "
      "data.chat_template, data.pair, data.loss_on and "
      "data.intra_document_masking,\nwithout which it is as the run had it.\n"
      "Examples:\n"
      "  tessera eval --model runs/NAME --data book.txt\n"
      "  tessera eval --model FOLDER --data book.txt --nproc 4 --mesh.tp=2 "
      "--mesh.pp=2");
  command->callback([command, flags, argc, argv] {
    run_as_rank([&] {
      with_flags_for({{"data.field", "--field"},
                      {"data.format", "--format"},
                      {"data.exclude", "--exclude"},
                      {"data.seq_len", "--seq-len"}},
                     [&] {
                       EvalCommand eval(*flags, command->remaining());
                       set_exit_code(eval.run(argc, argv));
                     });
    });
  });
}

}  // namespace tessera::cli
