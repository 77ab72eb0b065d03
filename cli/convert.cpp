// tessera convert: a trained model as a Hugging Face folder.
#include <filesystem>
#include <iostream>

#include "cli/commands.h"
#include "cli/model_folder.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

struct ConvertFlags {
  std::string from;
  std::string to;
  std::string dtype = "fp32";
};

void run_convert(const ConvertFlags& flags) {
  namespace fs = std::filesystem;
  TS_CHECK_IO(!fs::exists(flags.to) || fs::is_empty(flags.to), "--to ",
              flags.to,
              " is there already and not empty; nothing was written.");
  const auto source = find_model(flags.from, flags.dtype);
  const auto model = train::open_whole(source, dtype_of(flags.dtype));
  checkpoint::save_hugging_face(flags.to, source.config, *model);
  const fs::path tokenizer = source.tokenizer_folder;
  if (fs::exists(tokenizer / "tokenizer.json")) {
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
  command->add_option("--dtype", flags->dtype, "fp32, bf16 or fp64")
      ->check(CLI::IsMember({"fp32", "bf16", "fp64"}));
  command->callback([flags] { run_convert(*flags); });
}

}  // namespace tessera::cli
