// tessera inspect: what a file or a folder is, and what it holds.
#include <filesystem>
#include <iostream>
#include <limits>

#include "cli/checkpoint_words.h"
#include "cli/commands.h"
#include "cli/description.h"
#include "cli/inspect_runs.h"
#include "cli/parameter_words.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/peft_folder.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/data/chat_template.h"
#include "tessera/data/special_tokens.h"
#include "tessera/data/token_file.h"
#include "tessera/data/tokenizer.h"
#include "tessera/engine/run_config.h"
#include "tessera/models/hugging_face_config.h"
#include "tessera/train/trained_model.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
using checkpoint::Manifest;
using checkpoint::SafetensorsFile;
using detail::Json;

constexpr const char* kTokenizerConfig = "tokenizer_config.json";

Json row_of(const checkpoint::TensorSpec& tensor) {
  return {{"name", tensor.name},
          {"dtype", checkpoint::dtype_name(tensor.dtype)},
          {"shape", tensor.shape},
          {"bytes", tensor.bytes()}};
}

// "" where the file has the bytes that the manifest says.
std::string complaint_about(const std::string& folder, const Manifest& manifest,
                            const checkpoint::SavedFile& file) {
  try {
    checkpoint::verify_file(folder, manifest, file);
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// Of a checkpoint that a run wrote.
void add_parameters_of_run(Json& json, const std::string& extra,
                           const std::string& path) {
  const Json said = Json::parse(extra, nullptr, /*allow_exceptions=*/false);
  if (!said.is_object() || !said.contains("config")) return;
  add_parameters(json, [&] {
    return engine::saved_run_config(said["config"].dump(), path).model;
  });
}

Json describe_checkpoint(const std::string& path, bool verify) {
  const Manifest manifest = checkpoint::read_manifest(path);
  Json json = {{"kind", "checkpoint"}};
  json.update(words_of(manifest.extra));
  add_parameters_of_run(json, manifest.extra, path);
  json.update({{"step", manifest.step},
               {"parent", manifest.parent ? Json(*manifest.parent) : Json()},
               {"ranks", manifest.world_size},
               {"mesh", manifest.mesh},
               {"bytes", manifest.bytes()},
               {"verified", verify ? Json(true) : Json("no (use --verify)")}});
  Json files = Json::array();
  std::vector<int64_t> parts(manifest.tensors.size(), 0);
  std::vector<std::string> layouts(manifest.tensors.size());
  std::string first_complaint;
  for (const auto& file : manifest.files) {
    Json row = {{"name", file.name},
                {"bytes", file.bytes},
                {"tensors", file.boxes.size()}};
    if (verify) {
      const std::string complaint = complaint_about(path, manifest, file);
      row["state"] = complaint.empty() ? "good" : complaint;
      if (first_complaint.empty()) first_complaint = complaint;
    }
    files.push_back(row);
    for (const auto& saved : file.boxes) {
      ++parts[saved.tensor];
      layouts[saved.tensor] +=
          c10::str(layouts[saved.tensor].empty() ? "" : " ",
                   at::IntArrayRef(saved.box.size));
    }
  }
  if (!first_complaint.empty()) {
    json["verified"] = false;
    set_exit_code(static_cast<int>(ExitCode::kInputOutput));
  }
  json["files"] = files;
  json["tensors"] = Json::array();
  for (size_t i = 0; i < parts.size(); ++i) {
    Json row = row_of(manifest.tensors[i]);
    row["parts"] = parts[i];
    row["layout"] = parts[i] == 1 ? "whole" : layouts[i];
    json["tensors"].push_back(row);
  }
  return json;
}

// "good", or where to read what is wrong.
std::string state_of(const std::string& checkpoint) {
  return describe_checkpoint(checkpoint, true)["verified"] == true
             ? "good"
             : "bad: tessera inspect --verify " + checkpoint;
}

Json describe_safetensors(const std::string& path) {
  const SafetensorsFile file(path);
  Json json = {{"kind", "safetensors"},
               {"bytes", file.bytes().size()},
               {"metadata", Json(file.metadata()).dump()},
               {"tensors", Json::array()}};
  for (const auto& tensor : file.tensors()) {
    json["tensors"].push_back(row_of(tensor));
  }
  return json;
}

Json describe_hugging_face(const fs::path& path) {
  Json json = {{"kind", "Hugging Face folder"}};
  const std::string config = (path / "config.json").string();
  const Json parsed =
      detail::parse_json(detail::read_json_text(config), config);
  json["model_type"] =
      detail::as_string(parsed["model_type"], config + ": model_type");
  add_parameters(json, [&] {
    return models::read_hugging_face_config(path.string()).model;
  });
  json["tensors"] = Json::array();
  for (const auto& entry : fs::directory_iterator(path)) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file(entry.path().string());
    for (const auto& tensor : file.tensors()) {
      Json row = row_of(tensor);
      row["file"] = entry.path().filename().string();
      json["tensors"].push_back(row);
    }
  }
  return json;
}

Json describe_peft(const fs::path& path) {
  const std::string config = (path / "adapter_config.json").string();
  const Json parsed =
      detail::parse_json(detail::read_json_text(config), config);
  TS_CHECK_IO(parsed.is_object(), config, ": must be a JSON object.");
  Json json = {{"kind", "PEFT folder of adapters"}};
  json["base_model"] = parsed.value("base_model_name_or_path", Json());
  json["rank"] = parsed.value("r", Json());
  json["alpha"] = parsed.value("lora_alpha", Json());
  json["targets"] = parsed.value("target_modules", Json());
  json["use"] =
      "model.lora.from of a run whose model.from is the base model; a whole "
      "model: tessera convert --merge of the run that has them";
  json["tensors"] = Json::array();
  const fs::path weights = path / "adapter_model.safetensors";
  if (!fs::exists(weights)) return json;  // of older PEFT: a .bin
  const SafetensorsFile file(weights.string());
  for (const auto& tensor : file.tensors()) {
    json["tensors"].push_back(row_of(tensor));
  }
  return json;
}

// What tokenizer_config.json and chat_template.jinja of its folder say.
void add_chat(const std::string& path, Json& json) {
  Json tokens = Json::object();
  for (const auto& [name, token] : data::special_tokens_of(path)) {
    tokens[name] = token;
  }
  json["special tokens"] = tokens;
  try {
    const auto form = data::ChatTemplate::find(path);
    json["chat template"] = form ? form->name() : "none";
  } catch (const Error& error) {
    json["chat template"] = message_of(error);
  }
}

Json describe_tokenizer(const std::string& path) {
  const auto tokenizer = data::Tokenizer::load(path);
  Json json = {{"kind", "tokenizer"},
               {"vocab_size", tokenizer.vocab_size()},
               {"merges", tokenizer.spec().merges.size()}};
  add_chat(path, json);
  json["added tokens"] = Json::array();
  for (const auto& token : tokenizer.spec().added) {
    json["added tokens"].push_back({{"id", token.id},
                                    {"content", token.content},
                                    {"special", token.special}});
  }
  return json;
}

Json describe_tokenizer_config(const std::string& path) {
  Json json = {{"kind", "configuration of a tokenizer"},
               {"vocabulary", "in tokenizer.json, which is not beside it"}};
  if (fs::exists(fs::path(path).parent_path() / "tokenizer.json")) {
    json["vocabulary"] = "in tokenizer.json, beside it";
  }
  add_chat(path, json);
  return json;
}

Json describe_tokens(const std::string& path) {
  // Any id is within such a vocabulary: a model's own is checked in training.
  const data::TokenFile file(path, data::detect_format(path),
                             std::numeric_limits<int64_t>::max());
  file.check_ids();
  return {{"kind", "token file"},
          {"format", file.format()},
          {"tokens", file.size()},
          {"documents", file.num_documents() > 0 ? Json(file.num_documents())
                                                 : Json("not told")},
          {"bytes", fs::file_size(path)}};
}

Json describe_configuration(const std::string& path) {
  engine::RunConfig config;
  config::Section root;
  config.declare(root);
  const auto origins =
      config::resolve(root, detail::read_json_text(path), path, {});
  Json json = {{"kind", "configuration"},
               {"values", detail::parse_json(config::to_json(root), path)},
               {"text", config::print(root, origins)}};
  add_parameters(json, [&] {
    train::read_model_source(config, origins);
    return config.model;
  });
  return json;
}

// A JSON file with a "model" object that has merges.
bool is_tokenizer(const std::string& path) {
  const auto json = Json::parse(detail::read_json_text(path), nullptr,
                                /*allow_exceptions=*/false,
                                /*ignore_comments=*/true);
  if (!json.is_object() || !json.contains("model")) return false;
  return json["model"].is_object() && json["model"].contains("merges");
}

Json describe_folder(const fs::path& path, bool verify) {
  if (fs::exists(path / checkpoint::kManifestName)) {
    return describe_checkpoint(path.string(), verify);
  }
  const Verify checks = verify ? Verify(state_of) : Verify();
  if (is_run(path)) return describe_run(path, checks);
  if (checkpoint::is_hugging_face_folder(path.string())) {
    return describe_hugging_face(path);
  }
  if (checkpoint::is_peft_folder(path.string())) return describe_peft(path);
  if (fs::exists(path / "tokenizer.json")) {
    return describe_tokenizer((path / "tokenizer.json").string());
  }
  if (fs::exists(path / kTokenizerConfig)) {
    return describe_tokenizer_config((path / kTokenizerConfig).string());
  }
  const Json steps = describe_checkpoints(path, checks);
  if (!steps.empty()) return {{"kind", "checkpoints"}, {"checkpoints", steps}};
  const Json runs = describe_runs(path);
  TS_CHECK_IO(!runs.empty(), path.string(),
              ": is none of what inspect knows. Tried: a checkpoint "
              "(manifest.json), a run (config.json and logs/), a Hugging Face "
              "folder (config.json of a model), PEFT's adapters "
              "(adapter_config.json), a tokenizer (tokenizer.json, "
              "tokenizer_config.json), "
              "checkpoints (step-N), runs (folders with config.json and "
              "logs/).");
  return {{"kind", "runs"}, {"runs", runs}};
}

Json describe_file(const fs::path& path, bool verify) {
  if (path.filename() == checkpoint::kManifestName) {
    return describe_checkpoint(fs::absolute(path).parent_path().string(),
                               verify);
  }
  if (path.extension() == ".safetensors") {
    return describe_safetensors(path.string());
  }
  if (path.filename() == kTokenizerConfig) {
    return describe_tokenizer_config(path.string());
  }
  if (path.extension() == ".json") {
    return is_tokenizer(path.string()) ? describe_tokenizer(path.string())
                                       : describe_configuration(path.string());
  }
  const std::string format = data::detect_format(path.string());
  TS_CHECK_IO(format != "text" && format != "jsonl", path.string(),
              ": is none of what inspect knows. Tried: safetensors "
              "(.safetensors), a checkpoint (manifest.json), a configuration "
              "or a tokenizer (.json), a token "
              "file (.bin, .idx, .u16, .u32, llm.c's header, or a run's "
              "cache).");
  return describe_tokens(path.string());
}

struct InspectFlags {
  std::string path;
  bool json = false;
  bool verify = false;
};

void run_inspect(const InspectFlags& flags) {
  const fs::path path = flags.path;
  TS_CHECK_IO(fs::exists(path), flags.path,
              ": there is no such file or folder.");
  Json description = fs::is_directory(path)
                         ? describe_folder(path, flags.verify)
                         : describe_file(path, flags.verify);
  if (flags.json) {
    description.erase("text");
    std::cout << description.dump() << std::endl;
  } else {
    print_description(description);
  }
}

}  // namespace

void add_inspect(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "inspect",
      "Show what a checkpoint, run, token file or configuration holds");
  auto flags = std::make_shared<InspectFlags>();
  command->add_option("path", flags->path, "file or folder")->required();
  command->add_flag("--json", flags->json, "JSON, on one line");
  command->add_flag("--verify", flags->verify,
                    "read every byte of a checkpoint and compare checksums; "
                    "exit code 74 where one differs");
  command->callback([flags] { run_inspect(*flags); });
}

}  // namespace tessera::cli
