// tessera convert: a trained model as a Hugging Face folder, or a checkpoint in
// other files.
#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <optional>
#include <vector>

#include "cli/commands.h"
#include "cli/flag_values.h"
#include "cli/model_folder.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/hugging_face_files.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/peft_folder.h"
#include "tessera/checkpoint/reshard.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/engine/run_config.h"
#include "tessera/launch/signals.h"
#include "tessera/train/changes.h"
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
  std::optional<uint64_t> max_shard_bytes;
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
void write_model(const ConvertFlags& flags, const train::ModelSource& source,
                 const checkpoint::WholeParameter& whole,
                 const std::string& to) {
  namespace fs = std::filesystem;
  const auto& config = source.config;
  checkpoint::save_hugging_face(
      to, config, whole,
      static_cast<int64_t>(
          flags.max_shard_bytes.value_or(checkpoint::kMaxShardBytes)));
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

// As `to` has it, relative to the same folder: "a/b" of "a/b/".
std::filesystem::path folder_named(const std::string& to) {
  const auto plain =
      (std::filesystem::path(to) / "").lexically_normal().parent_path();
  const auto name = plain.filename();
  return name.empty() || name == "." || name == ".."
             ? std::filesystem::weakly_canonical(to)
             : plain;
}

// As a run folder of its own with that checkpoint alone: `tessera train` of its
// config.json goes on from there, once `written` has become flags.to.
void write_run(const ConvertFlags& flags, const train::ModelSource& source,
               const std::filesystem::path& written) {
  namespace fs = std::filesystem;
  TS_CHECK_CONFIG(source.is_checkpoint, "--shards: ", flags.from,
                  " is a Hugging Face folder, which has no state of a run. "
                  "Leave --shards out; a run begins from it as it is: "
                  "model.from.");
  const fs::path run = source.tokenizer_folder;
  const fs::path to = folder_named(flags.to);
  auto saved = train::saved_run_from(
      checkpoint::read_manifest(source.path).extra, source.path);
  auto config = engine::saved_run_config(saved.config, source.path);
  config.run.name = to.filename();
  config.run.dir = to.has_parent_path() ? to.parent_path() : fs::path(".");
  config.checkpoint.dir.clear();
  const std::string text = engine::to_json(config);
  engine::saved_run_config(text, flags.to);  // or it could not be used
  config.run.name = written.filename();
  const train::RunFolder folder(config);
  std::error_code error;
  fs::create_directories(folder.logs(), error);  // by which it is a run's
  TS_CHECK_IO(!error, "--to ", flags.to, ": cannot be made: ", error.message(),
              ".");
  saved.line_base = -1;  // commits are counted anew there
  checkpoint::reshard(source.path, folder.checkpoints(), flags.shards,
                      train::to_json(saved));
  write_file_atomic(folder.config(), text);
  if (fs::exists(run / "tokenizer.json")) {
    write_file_atomic(folder.tokenizer(), read_file(run / "tokenizer.json"));
  }
  keep_chat_files(run, folder.path(), /*has_tokenizer=*/true);
  if (!source.model_files.empty()) {
    checkpoint::copy_hugging_face_files(source.model_files,
                                        train::kept_model_files(folder.path()));
  }
}

// PEFT adds adapters to the model that is in the folder, whatever they were
// trained beside.
void require_base(const train::ModelSource& source) {
  constexpr const char* kWayOut = ". Merge the adapters: --merge.";
  const models::ModelConfig& model = source.config.model;
  TS_CHECK_CONFIG(!source.began_random,
                  "the weights beside the adapters were random "
                  "(model.load_weights is false), and are in no folder",
                  kWayOut);
  if (!std::filesystem::is_directory(model.from)) return;  // it was moved
  if (!checkpoint::is_hugging_face_folder(model.from)) {
    return log::warning("model.from is ", model.from,
                        ", which PEFT does not read: convert it too, and give "
                        "PEFT that folder.");
  }
  const auto changes = train::computed_otherwise(
      checkpoint::hugging_face_config(model.from).model, model);
  TS_CHECK_CONFIG(changes.empty(),
                  "the adapters were trained beside another model than PEFT "
                  "would add them to, ",
                  model.from, ": ", c10::Join("; ", changes), kWayOut);
}

void warn_of_capacity(const models::ModelConfig& model) {
  if (model.moe.experts == 0 || model.moe.capacity_factor <= 0) return;
  log::warning("model.moe.capacity_factor is ", model.moe.capacity_factor,
               ", which a Hugging Face folder cannot say: nothing is dropped "
               "there, and what was dropped in training has other logits.");
}

void write_hugging_face(const ConvertFlags& flags, train::ModelSource source,
                        const std::string& written) {
  if (flags.averaged) train::read_averages(source);
  auto& config = source.config;
  config.dtype = written_type(flags.dtype, source);
  const bool has_adapters = config.model.lora.rank > 0;
  TS_CHECK_CONFIG(!flags.merges || has_adapters, "--merge: ", flags.from,
                  " has no adapters (model.lora). Leave --merge out.");
  const bool writes_adapters = has_adapters && !flags.merges;
  TS_CHECK_CONFIG(!writes_adapters || !flags.max_shard_bytes,
                  "--max-shard-size: adapters are one file. Leave it out, or "
                  "give --merge.");
  if (writes_adapters) require_base(source);
  warn_of_capacity(config.model);
  // Each is rounded once, to what it is written in.
  const bool is_wide = config.dtype == at::kDouble || train::is_fp64(source);
  const auto opened = is_wide ? at::kDouble : at::kFloat;
  const auto whole = train::parameters_of(source, opened, flags.merges);
  if (writes_adapters) {
    checkpoint::save_peft(written, config.model, whole, config.model.from,
                          config.dtype);
  } else {
    config.model.lora = {};
    write_model(flags, source, whole, written);
  }
}

// In a checkpoint, or as one of its run, it would make both unusable.
void refuse_among_checkpoints(const std::filesystem::path& to,
                              const train::ModelSource& source) {
  namespace fs = std::filesystem;
  if (!source.is_checkpoint) return;
  const fs::path step =
      fs::weakly_canonical(fs::absolute(source.path) / "").parent_path();
  const fs::path there = fs::weakly_canonical(fs::absolute(to));
  const bool is_inside = *there.lexically_relative(step).begin() != "..";
  const bool is_beside = there.parent_path() == step.parent_path() &&
                         checkpoint::is_of_checkpoints(there.filename());
  TS_CHECK_IO(!is_inside && !is_beside, "--to ", to.string(),
              " lies among the checkpoints of ", step.parent_path().string(),
              ", where only a run writes. Give another folder.");
}

void become(const std::filesystem::path& written,
            const std::filesystem::path& to) {
  std::error_code error;
  std::filesystem::rename(written, to, error);
  TS_CHECK_IO(!error, "--to ", to.string(),
              ": cannot be made: ", error.message(), ".");
  sync_path(std::filesystem::absolute(to).parent_path());
}

// Where `to` is not there it becomes what is complete, whatever ends this.
void run_convert(const ConvertFlags& flags) {
  namespace fs = std::filesystem;
  TS_CHECK_IO(!fs::exists(flags.to) || fs::is_empty(flags.to), "--to ",
              flags.to,
              " is there already and not empty; nothing was written.");
  TS_CHECK_IO(fs::exists(flags.to) || !fs::is_symlink(flags.to), "--to ",
              flags.to, " is a link to nothing; nothing was written.");
  auto source = train::find_trained_model(flags.from, at::kFloat);
  const fs::path to = folder_named(flags.to);
  refuse_among_checkpoints(to, source);
  const bool is_new = !fs::exists(to);
  const fs::path written =
      is_new ? fs::path(c10::str(to.string(), ".tmp-", ::getpid())) : to;
  if (is_new && fs::exists(written)) {  // of one that was killed, long ago
    fs::remove_all(written);
  }
  // The folders on the way to it that are not there.
  std::vector<fs::path> made;
  for (fs::path each = fs::absolute(to).lexically_normal().parent_path();
       !fs::exists(fs::symlink_status(each)); each = each.parent_path()) {
    made.push_back(each);
  }
  // Half a folder would refuse the next try. What somebody else put on the way
  // stays.
  const auto remove = [&] {
    std::error_code error;
    if (is_new) {
      remove_whole(written);
      for (const fs::path& each : made) fs::remove(each, error);
      return;
    }
    for (fs::directory_iterator each(written, error), end; each != end;
         each.increment(error)) {
      remove_whole(each->path());
    }
  };
  try {
    const launch::TidyUp tidy(remove);
    if (flags.shards > 0) {
      write_run(flags, source, written);
    } else {
      write_hugging_face(flags, std::move(source), written.string());
    }
    if (is_new) become(written, to);
  } catch (...) {
    remove();
    throw;
  }
  std::cout << flags.to << std::endl;
}

}  // namespace

void add_convert(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("convert",
                             "Write a trained model as a Hugging Face folder, "
                             "or a checkpoint in other files");
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
  auto* const shard_bytes =
      command
          ->add_option(
              "--max-shard-size", flags->max_shard_bytes,
              "of a file with weights, as 500MB or 2GiB; more are "
              "several and an index; without it " +
                  std::to_string(checkpoint::kMaxShardBytes / 1'000'000'000) +
                  "GB")
          ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
          ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 60));
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
      ->excludes(dtype, shard_bytes, merge, averages);
  command->callback([flags] { run_convert(*flags); });
}

}  // namespace tessera::cli
