// tessera convert: a trained model as a Hugging Face folder, or a checkpoint in
// other files.
#include <filesystem>
#include <iostream>

#include "cli/commands.h"
#include "cli/flag_values.h"
#include "cli/model_folder.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/hugging_face_files.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/peft_folder.h"
#include "tessera/checkpoint/reshard.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/engine/run_config.h"
#include "tessera/models/adapters.h"
#include "tessera/train/model_files.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/state.h"

namespace tessera::cli {
namespace {

struct ConvertFlags {
  std::string from;
  std::string to;
  std::string dtype = "auto";
  bool merges = false;
  bool averaged = false;
  int64_t shards = 0;  // 0: a Hugging Face folder
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

// As a run folder of its own with that checkpoint alone: `tessera train` of its
// config.json goes on from there.
void write_run(const ConvertFlags& flags, const train::ModelSource& source) {
  namespace fs = std::filesystem;
  TS_CHECK_CONFIG(source.is_checkpoint, "--shards: ", flags.from,
                  " is a Hugging Face folder, which has no state of a run. "
                  "Leave --shards out; a run begins from it as it is: "
                  "model.from.");
  const fs::path run = source.tokenizer_folder;
  const fs::path to = fs::absolute(fs::path(flags.to) / "").lexically_normal();
  const auto saved = train::saved_run_from(
      checkpoint::read_manifest(source.path).extra, source.path);
  auto config = engine::run_config_from_text(saved.config, source.path);
  config.run.name = to.parent_path().filename();
  config.run.dir = to.parent_path().parent_path();
  config.checkpoint.dir.clear();
  const train::RunFolder folder(config);
  comm::run_threads(flags.shards, "shm", [&](comm::Communicator& ranks) {
    checkpoint::reshard(source.path, folder.checkpoints(), ranks.world());
  });
  write_file_atomic(folder.config(), engine::to_json(config));
  if (fs::exists(run / "tokenizer.json")) {
    write_file_atomic(folder.tokenizer(), read_file(run / "tokenizer.json"));
  }
  keep_chat_files(run, folder.path(), /*has_tokenizer=*/true);
  if (!source.model_files.empty()) {
    checkpoint::copy_hugging_face_files(source.model_files,
                                        train::kept_model_files(folder.path()));
  }
}

void write_folder(const ConvertFlags& flags, train::ModelSource source) {
  if (flags.shards > 0) return write_run(flags, source);
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
  if (has_adapters && !flags.merges) {
    checkpoint::save_peft(flags.to, *model, config.model.from, config.dtype);
  } else {
    models::merge_adapters(*model);
    config.model.lora = {};
    write_model(flags.to, source, *model);
  }
}

void run_convert(const ConvertFlags& flags) {
  namespace fs = std::filesystem;
  TS_CHECK_IO(!fs::exists(flags.to) || fs::is_empty(flags.to), "--to ",
              flags.to,
              " is there already and not empty; nothing was written.");
  auto source = train::find_trained_model(flags.from, at::kFloat);
  const bool was_there = fs::exists(flags.to);
  try {
    write_folder(flags, std::move(source));
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
  CLI::App* command =
      program.add_subcommand("convert",
                             "Write a trained model as a Hugging Face folder, "
                             "or a checkpoint in other "
                             "files");
  auto flags = std::make_shared<ConvertFlags>();
  command
      ->add_option("--from", flags->from,
                   "checkpoint, run folder or Hugging Face folder")
      ->required()
      ->check(some_path());
  command->add_option("--to", flags->to, "folder to make")
      ->required()
      ->check(some_path());
  auto* const dtype =
      command
          ->add_option("--dtype", flags->dtype,
                       "of the weights: fp32, bf16, fp16 or fp64; auto: as in "
                       "the Hugging Face folder that they came from, else fp32")
          ->capture_default_str()
          ->check(CLI::IsMember({"auto", "fp32", "bf16", "fp16", "fp64"}));
  auto* const merge = command->add_flag(
      "--merge", flags->merges,
      "add adapters (model.lora) to the weights; without it they become a "
      "folder of PEFT");
  auto* const averages = command->add_flag(
      "--ema", flags->averaged, "the averages of the weights (optimizer.ema)");
  command
      ->add_option("--shards", flags->shards,
                   "in place of a Hugging Face folder a run folder with the "
                   "checkpoint alone, the optimizer's states too, in as many "
                   "files as so many ranks write; training goes on from it")
      ->check(whole_number(1, 4096))
      ->excludes(dtype, merge, averages);
  command->callback([flags] { run_convert(*flags); });
}

}  // namespace tessera::cli
