// tessera generate: text that a model writes after a prompt.
#include "tessera/models/generate.h"

#include <iostream>

#include "cli/commands.h"
#include "cli/model_folder.h"
#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

struct GenerateFlags {
  std::string model;
  std::string prompt;
  std::string tokenizer;
  std::string dtype = "fp32";
  models::GenerateOptions options{.temperature = 0.8, .top_k = 50};
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

void run(const GenerateFlags& flags) {
  auto model = load_model(flags.model, flags.dtype);
  const auto tokenizer = load_tokenizer(flags.tokenizer, model);
  auto options = flags.options;
  options.num_tokens = tokenizer.vocab_size();
  options.stop_tokens = model.config.eos_tokens;
  const auto prompt = prompt_ids(flags, tokenizer);
  Screen screen(tokenizer, prompt);
  models::generate(*model.decoder, prompt, options, [&](int64_t id) {
    screen.add(id);
    return true;
  });
  screen.finish();
}

}  // namespace

void add_generate(CLI::App& program) {
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
  command->footer(
      "Example:\n"
      "  tessera generate --model runs/NAME --prompt 'In the beginning' \\\n"
      "    --temperature 0.7");
  command->callback([flags] { run(*flags); });
}

}  // namespace tessera::cli
