// tessera convert: a trained model as a Hugging Face folder.
#include <filesystem>
#include <iostream>

#include "cli/commands.h"
#include "cli/model_folder.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/hugging_face_files.h"
#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

struct ConvertFlags {
  std::string from;
  std::string to;
  std::string dtype = "auto";
};

// Of the weights that are written.
at::ScalarType written_type(const std::string& word,
                            const train::ModelSource& source) {
  if (word == "auto") return train::dtype_of_files(source);
  return word == "fp16" ? at::kHalf : dtype_of(word);
}

void run_convert(const ConvertFlags& flags) {
  namespace fs = std::filesystem;
  TS_CHECK_IO(!fs::exists(flags.to) || fs::is_empty(flags.to), "--to ",
              flags.to,
              " is there already and not empty; nothing was written.");
  auto source = train::find_trained_model(flags.from, at::kFloat);
  auto& config = source.config;
  config.dtype = written_type(flags.dtype, source);
  // A model is opened in what loses nothing, and not in fp16.
  const auto opened = config.dtype == at::kHalf ? at::kFloat : config.dtype;
  const auto model = train::open_whole(source, opened);
  checkpoint::save_hugging_face(flags.to, config, *model);
  if (!source.model_files.empty()) {
    checkpoint::restore_hugging_face_files(
        flags.to, {source.model_files, source.has_files_tokenizer}, config);
  }
  const fs::path tokenizer = source.tokenizer_folder;
  if (!fs::exists(fs::path(flags.to) / "tokenizer.json") &&
      fs::exists(tokenizer / "tokenizer.json")) {
    data::Tokenizer::load(tokenizer.string()).save(flags.to);
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
      ->required();
  command->add_option("--to", flags->to, "Hugging Face folder to make")
      ->required();
  command
      ->add_option("--dtype", flags->dtype,
                   "of the weights: fp32, bf16, fp16 or fp64; auto: as in the "
                   "Hugging Face folder that they came from, else fp32")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "fp32", "bf16", "fp16", "fp64"}));
  command->callback([flags] { run_convert(*flags); });
}

}  // namespace tessera::cli
