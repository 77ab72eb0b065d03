// tessera convert: a trained model as a Hugging Face folder.
#include <filesystem>
#include <iostream>

#include "cli/commands.h"
#include "cli/flag_values.h"
#include "cli/model_folder.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/hugging_face_files.h"
#include "tessera/checkpoint/peft_folder.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/models/adapters.h"

namespace tessera::cli {
namespace {

struct ConvertFlags {
  std::string from;
  std::string to;
  std::string dtype = "auto";
  bool merges = false;
  bool averaged = false;
};

// Of the weights that are written.
at::ScalarType written_type(const std::string& word,
                            const train::ModelSource& source) {
  if (word == "auto") return train::dtype_of_files(source);
  return dtype_of(word);
}

// The chat template that the run was trained with, whoever gave it. The file
// that names special tokens, and may have the template, goes with the
// tokenizer.
void keep_chat_files(const std::filesystem::path& run,
                     const std::filesystem::path& to, bool has_tokenizer) {
  const auto keep = [&](const char* name) {
    const auto file = run / name;
    if (std::filesystem::exists(file)) {
      write_file_atomic(to / name, read_file(file));
    }
  };
  keep("chat_template.jinja");
  if (has_tokenizer || !std::filesystem::exists(to / "tokenizer_config.json")) {
    keep("tokenizer_config.json");
  }
}

// The whole model, with the files that it came with.
void write_model(const std::string& to, const train::ModelSource& source,
                 models::Model& model) {
  namespace fs = std::filesystem;
  const auto& config = source.config;
  checkpoint::save_hugging_face(to, config, model);
  if (!source.model_files.empty()) {
    checkpoint::restore_hugging_face_files(
        to, {source.model_files, source.has_files_tokenizer}, config);
  }
  const fs::path tokenizer = source.tokenizer_folder;
  const bool is_run_s = !fs::exists(fs::path(to) / "tokenizer.json") &&
                        fs::exists(tokenizer / "tokenizer.json");
  if (is_run_s) data::Tokenizer::load(tokenizer.string()).save(to);
  keep_chat_files(tokenizer, to, is_run_s);
}

void run_convert(const ConvertFlags& flags) {
  namespace fs = std::filesystem;
  TS_CHECK_IO(!fs::exists(flags.to) || fs::is_empty(flags.to), "--to ",
              flags.to,
              " is there already and not empty; nothing was written.");
  auto source = train::find_trained_model(flags.from, at::kFloat);
  if (flags.averaged) train::read_averages(source);
  auto& config = source.config;
  config.dtype = written_type(flags.dtype, source);
  const bool has_adapters = config.model.lora.rank > 0;
  TS_CHECK_CONFIG(!flags.merges || has_adapters, "--merge: ", flags.from,
                  " has no adapters (model.lora). Leave --merge out.");
  // A model is opened in what loses nothing, and not in fp16.
  const bool is_wide = config.dtype == at::kDouble;
  const bool must_widen = config.dtype == at::kHalf || has_adapters;
  const auto opened = must_widen && !is_wide ? at::kFloat : config.dtype;
  const auto model = train::open_whole(source, opened);
  const bool was_there = fs::exists(flags.to);
  try {
    if (has_adapters && !flags.merges) {
      checkpoint::save_peft(flags.to, *model, config.model.from, config.dtype);
    } else {
      models::merge_adapters(*model);
      config.model.lora = {};
      write_model(flags.to, source, *model);
    }
  } catch (...) {  // half a folder would refuse the next try
    std::error_code error;
    for (fs::directory_iterator each(flags.to, error), end; each != end;
         each.increment(error)) {
      fs::remove_all(each->path(), error);
    }
    if (!was_there) fs::remove(flags.to, error);
    throw;
  }
  std::cout << flags.to << std::endl;
}

}  // namespace

void add_convert(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "convert", "Write a trained model as a Hugging Face folder");
  auto flags = std::make_shared<ConvertFlags>();
  command
      ->add_option("--from", flags->from,
                   "checkpoint, run folder or Hugging Face folder")
      ->required()
      ->check(some_path());
  command->add_option("--to", flags->to, "Hugging Face folder to make")
      ->required()
      ->check(some_path());
  command
      ->add_option("--dtype", flags->dtype,
                   "of the weights: fp32, bf16, fp16 or fp64; auto: as in the "
                   "Hugging Face folder that they came from, else fp32")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "fp32", "bf16", "fp16", "fp64"}));
  command->add_flag("--merge", flags->merges,
                    "add adapters (model.lora) to the weights; without it they "
                    "become a folder of PEFT");
  command->add_flag("--ema", flags->averaged,
                    "the averages of the weights (optimizer.ema)");
  command->callback([flags] { run_convert(*flags); });
}

}  // namespace tessera::cli
