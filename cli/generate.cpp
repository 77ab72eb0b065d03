// tessera generate: text that a model writes after a prompt.
#include "tessera/models/generate.h"

#include <algorithm>
#include <functional>
#include <iostream>
#include <iterator>
#include <limits>
#include <optional>

#include "cli/chat_prompt.h"
#include "cli/commands.h"
#include "cli/flag_values.h"
#include "cli/generated_text.h"
#include "cli/model_folder.h"
#include "cli/overrides.h"
#include "cli/ranks.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/engine/generate.h"
#include "tessera/engine/run_devices.h"
#include "tessera/train/memory_check.h"

namespace tessera::cli {
namespace {

struct GenerateFlags {
  std::string model;
  std::string prompt;
  std::string prompt_file;
  bool chat = false;
  std::string system;
  std::string tokenizer;
  std::string dtype = "fp32";
  int64_t samples = 1;
  std::vector<std::string> stops;
  models::GenerateOptions options{.sampling = models::kUsualSampling};
  RankFlags ranks;
};

std::vector<int64_t> prompt_ids(const std::string& prompt,
                                const data::Tokenizer& tokenizer) {
  auto ids = tokenizer.encode(prompt, /*special_tokens=*/true);
  if (ids.empty() && tokenizer.end_of_text()) {
    ids.push_back(*tokenizer.end_of_text());
  }
  TS_CHECK_USAGE(!ids.empty(), "--prompt: no token to start from.");
  return ids;
}

std::vector<std::string> keys_of_generation() {
  return keys_of_placement({"pipeline.split"});
}

class GenerateCommand {
 public:
  GenerateCommand(const GenerateFlags& flags,
                  const std::vector<std::string>& extras)
      : flags_(flags),
        source_(find_model(flags.model, flags.dtype)),
        config_(
            mesh_config(source_, flags.dtype, extras, keys_of_generation())),
        tokenizer_(load_tokenizer(flags.tokenizer, source_)) {
    flags_.options.num_tokens = tokenizer_.vocab_size();
    flags_.options.stop_tokens = train::stop_tokens(source_);
    if (flags.chat) {
      const auto chat = chat_prompt(
          flags.system, flags.prompt,
          flags.tokenizer.empty() ? source_.tokenizer_folder : flags.tokenizer,
          tokenizer_);
      prompt_ = chat.ids;
      std::ranges::copy(chat.ends,
                        std::back_inserter(flags_.options.stop_tokens));
    } else {
      prompt_ = prompt_ids(flags.prompt, tokenizer_);
    }
    config_.data.seq_len = config_.batch.micro = 1;
    models::check_generation(config_.model, prompt_, flags_.options);
    config_.model.moe.capacity_factor = 0;  // of samples: a text drops nothing
  }

  int run(const launch::RankEnvironment& place,
          std::vector<std::string> arguments) {
    const int64_t world_size = world_of(config_, flags_.ranks, place);
    engine::share_out_ranks(config_, world_size);
    engine::check_generation(config_, world_size);
    engine::complete_for_evaluation(config_, world_size);
    // Ranks that are started with this command line take the checkpoint that
    // was the newest here, and find what standard input had, once, in a file.
    std::optional<TemporaryFolder> folder;
    if (world_size > 1) {
      replace_flag(arguments, "--model", source_.path);
      if (flags_.prompt_file == "-") {
        const std::string file = folder.emplace().file("prompt");
        write_file_atomic(file, flags_.prompt + "\n");
        replace_flag(arguments, "--prompt-file", file);
      }
    }
    // The ranks that this program starts have heard of it from their launcher.
    if (place.source != "tessera" && place.rank == 0) warn_of_repeats();
    const auto prepare = [this](const launch::RankEnvironment& first) {
      train::check_memory(config_, {first.rank, first.local_world_size},
                          train::memory_of_host(),
                          program::Purpose::kEvaluation);
    };
    const RankJob job{.comm = config_.comm,
                      .devices = engine::devices_of_ranks(config_, world_size),
                      .prepare = prepare,
                      .work =
                          [this](comm::Communicator& ranks) {
                            write(ranks);
                            return static_cast<int>(ExitCode::kOk);
                          },
                      .arguments = std::move(arguments)};
    return run_ranks(job, flags_.ranks, place, world_size);
  }

 private:
  using Sampler = std::function<std::vector<int64_t>(
      const models::GenerateOptions&, const models::OnToken&)>;

  void write(comm::Communicator& ranks) const {
    with_model(source_, config_, ranks, [&](engine::RankModel& model) {
      write_samples(ranks, [&](const auto& options, const auto& on_token) {
        return engine::generate(model, ranks, prompt_, options, on_token);
      });
    });
  }

  // All ranks follow the text, and so end it at the same token; one shows it.
  // A rank by itself ends where nobody reads along any more.
  void write_samples(comm::Communicator& ranks, const Sampler& sampler) const {
    const bool shows = ranks.rank() == 0;
    const auto is_heard = [&] {
      return ranks.world_size() > 1 || std::cout.good();
    };
    for (int64_t sample = 0; sample < flags_.samples; ++sample) {
      auto options = flags_.options;
      options.sample = sample;
      GeneratedText text(tokenizer_, prompt_, flags_.stops);
      if (shows && flags_.samples > 1) {
        std::cout << "--- " << sample + 1 << " of " << flags_.samples
                  << " ---\n";
      }
      const auto show = [shows](const std::string& part) {
        if (shows) std::cout << part << std::flush;
      };
      const std::string prompt = text.take();
      if (!flags_.chat) show(prompt);
      const auto tokens = sampler(options, [&](int64_t id) {
        const bool goes_on = text.add(id);
        show(text.take());
        return goes_on && is_heard();
      });
      if (!is_heard()) return;
      show(text.take_rest() + "\n");
      if (shows && !text.has_stopped()) tell_where_cut(tokens.size());
    }
  }

  void warn_of_repeats() const {
    const auto& sampling = flags_.options.sampling;
    const bool draws = sampling.temperature > 0 && sampling.top_k != 1;
    if (flags_.samples == 1 || draws) return;
    log::warning("-n ", flags_.samples, " has no effect but to repeat: ",
                 sampling.temperature > 0 ? "--top-k 1" : "--temperature 0",
                 " always takes the likeliest token, so all texts are the "
                 "same.");
  }

  void tell_where_cut(size_t written) const {
    const auto length = static_cast<int64_t>(prompt_.size() + written);
    const int64_t asked = flags_.options.max_new_tokens;
    if (length < config_.model.max_seq ||
        static_cast<int64_t>(written) >= asked) {
      return;
    }
    log::warning("the text ends where the model does: model.max_seq is ",
                 config_.model.max_seq, ", of which the prompt takes ",
                 prompt_.size(), "; --max-tokens asked for ", asked, ".");
  }

  GenerateFlags flags_;
  const train::ModelSource source_;
  engine::RunConfig config_;
  const data::Tokenizer tokenizer_;
  std::vector<int64_t> prompt_;
};

int run_generate(GenerateFlags flags, const std::vector<std::string>& extras,
                 std::vector<std::string> arguments) {
  const auto place = find_place(flags.ranks);
  if (!flags.prompt_file.empty()) {
    TS_CHECK_USAGE(flags.prompt_file != "-" || place.source == "none",
                   "--prompt-file -: the ranks of another launcher do not "
                   "share standard input. Give them a file.");
    flags.prompt = prompt_from(flags.prompt_file);
  }
  return GenerateCommand(flags, extras).run(place, std::move(arguments));
}

void add_prompt_flags(CLI::App& command, GenerateFlags& flags) {
  auto* prompts = command.add_option_group("prompt");
  prompts->add_option("--prompt", flags.prompt, "what the text starts with");
  prompts
      ->add_option("--prompt-file", flags.prompt_file,
                   "the same from a file, or from standard input (-), "
                   "without a last newline")
      ->check(some_path());
  prompts->require_option(1);
  auto* chat = command.add_flag("--chat", flags.chat,
                                "the prompt is a question, put as the "
                                "tokenizer's chat template has it; the answer "
                                "alone is shown");
  command
      .add_option("--system", flags.system, "of --chat: the system's message")
      ->needs(chat);
}

void add_sampling_flags(CLI::App& command, models::SamplingOptions& sampling) {
  constexpr double kAny = std::numeric_limits<double>::max();
  command
      .add_option("--temperature", sampling.temperature,
                  "0: always the likeliest token")
      ->capture_default_str()
      ->check(number_between(0, kAny));
  command
      .add_option("--top-k", sampling.top_k,
                  "draw among the k likeliest; 0: among all")
      ->capture_default_str()
      ->check(whole_number(0));
  command
      .add_option("--top-p", sampling.top_p,
                  "among the fewest that reach this probability")
      ->capture_default_str()
      ->check(number_between(0, 1, /*above=*/true));
  command
      .add_option("--min-p", sampling.min_p,
                  "among those with this share of the likeliest's probability")
      ->capture_default_str()
      ->check(number_between(0, 1));
  command
      .add_option("--repetition-penalty", sampling.repetition_penalty,
                  "above 1: tokens that the text has become less likely")
      ->capture_default_str()
      ->check(number_between(0, kAny, /*above=*/true));
}

}  // namespace

void add_generate(CLI::App& program, int argc, char** argv) {
  auto flags = std::make_shared<GenerateFlags>();
  auto& options = flags->options;
  CLI::App* command =
      program.add_subcommand("generate", "Text that a model writes");
  command
      ->add_option("--model", flags->model,
                   "run folder, checkpoint or Hugging Face folder")
      ->required();
  add_prompt_flags(*command, *flags);
  command->add_option("--max-tokens", options.max_new_tokens, "tokens to write")
      ->capture_default_str()
      ->check(whole_number(1, models::kMaxSize));
  command->add_option("-n", flags->samples, "texts to write")
      ->capture_default_str()
      ->check(whole_number(1, models::kMaxSize));
  command
      ->add_option("--stop", flags->stops,
                   "end before this text; may be given several times")
      ->allow_extra_args(false)
      ->check([](const std::string& text) {
        return text.empty() ? "an empty text ends nothing" : "";
      });
  add_sampling_flags(*command, options.sampling);
  command->add_option("--seed", options.seed, "another seed, another text")
      ->capture_default_str()
      ->check(whole_number(0));
  command->add_option("--tokenizer", flags->tokenizer,
                      "tokenizer.json, where it is not the model's");
  command->add_option("--dtype", flags->dtype, "fp32, bf16, fp16 or fp64")
      ->capture_default_str()
      ->check(CLI::IsMember({"fp32", "bf16", "fp16", "fp64"}));
  add_rank_flags(*command, flags->ranks);
  take_keys(*command, keys_of_generation());
  command->footer(
      "Where the ranks are, what they compute on and how they talk, are keys "
      "of the\nconfiguration: run.device, mesh.*, pipeline.split, comm.*.\n"
      "Examples:\n"
      "  tessera generate --model runs/NAME --prompt 'In the beginning' \\\n"
      "    --temperature 0.7\n"
      "  tessera generate --model FOLDER --prompt 'Once' --nproc 2 "
      "--mesh.pp=2");
  command->callback([command, flags, argc, argv] {
    run_as_rank([&] {
      set_exit_code(
          run_generate(*flags, command->remaining(), {argv, argv + argc}));
    });
  });
}

}  // namespace tessera::cli
