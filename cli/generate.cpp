// tessera generate: text that a model writes after a prompt.
#include "tessera/models/generate.h"

#include <functional>
#include <iostream>

#include "cli/commands.h"
#include "cli/model_folder.h"
#include "tessera/core/error.h"
#include "tessera/engine/generate.h"
#include "tessera/train/preflight.h"

namespace tessera::cli {
namespace {

struct GenerateFlags {
  std::string model;
  std::string prompt;
  std::string tokenizer;
  std::string dtype = "fp32";
  models::GenerateOptions options{.temperature = 0.8, .top_k = 50};
  RankFlags ranks;
};

// Shows text as its tokens come, whole characters only.
class Screen {
 public:
  Screen(const data::Tokenizer& tokenizer, std::vector<int64_t> prompt)
      : tokenizer_(tokenizer), ids_(std::move(prompt)) {
    show(tokenizer_.decode(ids_));
  }

  void add(int64_t id) {
    ids_.push_back(id);
    const std::string text = tokenizer_.decode(ids_);
    if (!text.ends_with("\xEF\xBF\xBD")) show(text);  // U+FFFD: half of one
  }

  void finish() {
    show(tokenizer_.decode(ids_));
    std::cout << std::endl;
  }

 private:
  void show(const std::string& text) {
    if (text.size() <= shown_) return;
    std::cout << text.substr(shown_) << std::flush;
    shown_ = text.size();
  }

  const data::Tokenizer& tokenizer_;
  std::vector<int64_t> ids_;
  size_t shown_ = 0;
};

std::vector<int64_t> prompt_ids(const GenerateFlags& flags,
                                const data::Tokenizer& tokenizer) {
  auto ids = tokenizer.encode(flags.prompt, /*special_tokens=*/true);
  if (ids.empty() && tokenizer.end_of_text()) {
    ids.push_back(*tokenizer.end_of_text());
  }
  TS_CHECK_USAGE(!ids.empty(), "--prompt: no token to start from.");
  return ids;
}

class GenerateCommand {
 public:
  GenerateCommand(const GenerateFlags& flags,
                  const std::vector<std::string>& extras)
      : flags_(flags),
        source_(find_model(flags.model, flags.dtype)),
        config_(
            mesh_config(source_, flags.dtype, extras,
                        {"mesh.pp", "mesh.dp", "mesh.dp_replicate",
                         "mesh.dp_shard", "mesh.cp", "mesh.tp", "mesh.ep",
                         "mesh.etp", "mesh.order", "pipeline.split",
                         "comm.backend", "comm.algorithm", "comm.timeout_s"})),
        tokenizer_(load_tokenizer(flags.tokenizer, source_)),
        prompt_(prompt_ids(flags, tokenizer_)) {
    flags_.options.num_tokens = tokenizer_.vocab_size();
    flags_.options.stop_tokens = source_.config.eos_tokens;
    config_.data.seq_len = config_.batch.micro = 1;
  }

  int run(int argc, char** argv) {
    const auto place = find_place(flags_.ranks);
    const int64_t world_size = world_of(config_, flags_.ranks, place);
    engine::check_generation(config_, world_size);
    engine::complete_for_evaluation(config_, world_size);
    const auto prepare = [this](const launch::RankEnvironment& first) {
      train::check_memory(config_, {first.rank, first.local_world_size},
                          train::memory_of_host(),
                          program::Purpose::kEvaluation);
    };
    // One rank alone has all cores, and nobody to talk to.
    if (place.source == "none" && world_size == 1) {
      prepare(place);
      return write_alone();
    }
    const RankJob job{.comm = config_.comm,
                      .prepare = prepare,
                      .work =
                          [this](comm::Communicator& ranks) {
                            write(ranks);
                            return static_cast<int>(ExitCode::kOk);
                          },
                      .arguments = {argv, argv + argc}};
    return run_ranks(job, flags_.ranks, place, world_size);
  }

 private:
  int write_alone() const {
    const auto model = train::open_whole(source_, dtype_of(flags_.dtype));
    show([&](const models::OnToken& on_token) {
      models::generate(*model, prompt_, flags_.options, on_token);
    });
    return static_cast<int>(ExitCode::kOk);
  }

  void write(comm::Communicator& ranks) const {
    const auto model = train::open_for_evaluation(source_, config_, ranks);
    const auto text = [&](const models::OnToken& on_token) {
      engine::generate(*model, ranks, prompt_, flags_.options, on_token);
    };
    ranks.rank() == 0 ? show(text) : text(nullptr);
  }

  void show(const std::function<void(const models::OnToken&)>& text) const {
    Screen screen(tokenizer_, prompt_);
    text([&](int64_t id) {
      screen.add(id);
      return true;
    });
    screen.finish();
  }

  GenerateFlags flags_;
  const train::ModelSource source_;
  engine::RunConfig config_;
  const data::Tokenizer tokenizer_;
  const std::vector<int64_t> prompt_;
};

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
  command->add_option("--prompt", flags->prompt, "what the text starts with")
      ->required();
  command->add_option("--max-tokens", options.max_new_tokens, "tokens to write")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command
      ->add_option("--temperature", options.temperature,
                   "0: always the likeliest token")
      ->capture_default_str();
  command
      ->add_option("--top-k", options.top_k,
                   "draw among the k likeliest; 0: among all")
      ->capture_default_str();
  command
      ->add_option("--top-p", options.top_p,
                   "among the fewest that reach this probability")
      ->capture_default_str();
  command->add_option("--seed", options.seed, "another seed, another text")
      ->capture_default_str();
  command->add_option("--tokenizer", flags->tokenizer,
                      "tokenizer.json, where it is not the model's");
  command->add_option("--dtype", flags->dtype, "fp32, bf16 or fp64")
      ->capture_default_str();
  add_rank_flags(*command, flags->ranks);
  command->allow_extras();
  command->footer(
      "Where the ranks are, and how they talk, are keys of the configuration:\n"
      "mesh.*, pipeline.split, comm.*.\n"
      "Examples:\n"
      "  tessera generate --model runs/NAME --prompt 'In the beginning' \\\n"
      "    --temperature 0.7\n"
      "  tessera generate --model FOLDER --prompt 'Once' --nproc 2 "
      "--mesh.pp=2");
  command->callback([command, flags, argc, argv] {
    set_exit_code(
        GenerateCommand(*flags, command->remaining()).run(argc, argv));
  });
}

}  // namespace tessera::cli
