// tessera inspect: what a file or a folder is, and what it holds.
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <limits>
#include <sstream>

#include "cli/commands.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/units.h"
#include "tessera/data/token_file.h"
#include "tessera/data/tokenizer.h"
#include "tessera/engine/run_config.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
using checkpoint::Manifest;
using checkpoint::SafetensorsFile;
using detail::Json;

constexpr uint64_t kMaxJsonBytes = uint64_t{1} << 30;

// ---- descriptions: scalars become lines, lists of objects become tables

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

Json describe_checkpoint(const std::string& path, bool verify) {
  const Manifest manifest = checkpoint::read_manifest(path);
  Json json = {{"kind", "checkpoint"},
               {"step", manifest.step},
               {"parent", manifest.parent ? Json(*manifest.parent) : Json()},
               {"ranks", manifest.world_size},
               {"mesh", manifest.mesh},
               {"bytes", manifest.bytes()},
               {"verified", verify ? Json(true) : Json("no (use --verify)")}};
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

Json steps_in(const fs::path& folder, bool verify) {
  Json steps = Json::array();
  for (const auto& found : checkpoint::list_checkpoints(folder.string())) {
    Json row = {{"name", "step-" + std::to_string(found.step)}};
    row["state"] = "not verified (use --verify)";
    if (!found.complaint.empty()) {
      row["state"] = found.complaint;
    } else if (verify) {
      const auto path =
          (folder / ("step-" + std::to_string(found.step))).string();
      row["state"] = describe_checkpoint(path, true)["verified"] == true
                         ? "good"
                         : "bad: tessera inspect --verify " + path;
    }
    steps.push_back(row);
  }
  return steps;
}

Json describe_run(const fs::path& path, bool verify) {
  Json json = {{"kind", "run"}};
  const auto config = engine::run_config_from_text(
      read_file(path / "config.json", kMaxJsonBytes),
      (path / "config.json").string());
  json["name"] = config.run.name;
  json["model"] = config.model.family;
  json["steps"] = config.run.steps;
  std::istringstream metrics(fs::exists(path / "metrics.jsonl")
                                 ? read_file(path / "metrics.jsonl")
                                 : "");
  std::string line;
  std::string last;
  while (std::getline(metrics, line)) {
    if (!metrics.eof()) last = line;  // a line is whole with its end alone
  }
  json["last step"] = last.empty() ? Json("none yet")
                                   : detail::parse_json(last, "metrics.jsonl");
  if (fs::exists(path / "summary.json")) {
    const std::string summary = (path / "summary.json").string();
    json["summary"] = detail::parse_json(read_file(summary), summary);
  }
  const fs::path checkpoints = config.checkpoint.dir.empty()
                                   ? path / "checkpoints"
                                   : fs::path(config.checkpoint.dir);
  json["checkpoints"] = steps_in(checkpoints, verify);
  return json;
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
  const Json parsed = detail::parse_json(read_file(config), config);
  json["model_type"] =
      detail::as_string(parsed["model_type"], config + ": model_type");
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

Json describe_tokenizer(const std::string& path) {
  const auto tokenizer = data::Tokenizer::load(path);
  Json json = {{"kind", "tokenizer"},
               {"vocab_size", tokenizer.vocab_size()},
               {"merges", tokenizer.spec().merges.size()},
               {"added tokens", Json::array()}};
  for (const auto& token : tokenizer.spec().added) {
    json["added tokens"].push_back({{"id", token.id},
                                    {"content", token.content},
                                    {"special", token.special}});
  }
  return json;
}

Json describe_tokens(const std::string& path) {
  // Any id is within such a vocabulary: a model's own is checked in training.
  const data::TokenFile file(path, "auto", std::numeric_limits<int64_t>::max());
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
      config::resolve(root, read_file(path, kMaxJsonBytes), path, {});
  return {{"kind", "configuration"},
          {"values", detail::parse_json(config::to_json(root), path)},
          {"text", config::print(root, origins)}};
}

// A JSON file with a "model" object that has merges.
bool is_tokenizer(const std::string& path) {
  const auto json = Json::parse(read_file(path, kMaxJsonBytes), nullptr,
                                /*allow_exceptions=*/false,
                                /*ignore_comments=*/true);
  if (!json.is_object() || !json.contains("model")) return false;
  return json["model"].is_object() && json["model"].contains("merges");
}

Json describe_folder(const fs::path& path, bool verify) {
  if (fs::exists(path / checkpoint::kManifestName)) {
    return describe_checkpoint(path.string(), verify);
  }
  if (fs::exists(path / "config.json") && fs::exists(path / "logs")) {
    return describe_run(path, verify);
  }
  if (checkpoint::is_hugging_face_folder(path.string())) {
    return describe_hugging_face(path);
  }
  if (fs::exists(path / "tokenizer.json")) {
    return describe_tokenizer((path / "tokenizer.json").string());
  }
  const Json steps = steps_in(path, verify);
  TS_CHECK_IO(!steps.empty(), path.string(),
              ": is none of what inspect knows. Tried: a checkpoint "
              "(manifest.json), a run (config.json and logs/), a Hugging Face "
              "folder (config.json of a model), a tokenizer (tokenizer.json), "
              "checkpoints (step-N).");
  return {{"kind", "checkpoints"}, {"checkpoints", steps}};
}

Json describe_file(const fs::path& path, bool verify) {
  if (path.filename() == checkpoint::kManifestName) {
    return describe_checkpoint(fs::absolute(path).parent_path().string(),
                               verify);
  }
  if (path.extension() == ".safetensors") {
    return describe_safetensors(path.string());
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

// ---- as text

std::string cell(const std::string& key, const Json& value) {
  if (value.is_null()) return "none";
  if (key == "bytes") return bytes_text(value.get<uint64_t>());
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void print_table(const Json& rows) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : rows.front().items()) keys.push_back(key);
  std::vector<std::vector<std::string>> lines = {keys};
  for (const Json& row : rows) {
    lines.emplace_back();
    for (const std::string& key : keys) {
      lines.back().push_back(row.contains(key) ? cell(key, row[key]) : "");
    }
  }
  std::vector<size_t> widths(keys.size(), 0);
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      widths[i] = std::max(widths[i], line[i].size());
    }
  }
  for (const auto& line : lines) {
    std::string text;
    for (size_t i = 0; i < line.size(); ++i) {
      text += line[i];
      if (i + 1 < line.size()) text.append(widths[i] + 2 - line[i].size(), ' ');
    }
    std::cout << "  " << text << "\n";
  }
}

void print(const Json& description) {
  for (const auto& [key, value] : description.items()) {
    if (key == "values") continue;  // "text" says the same
    if (key == "text") {
      std::cout << value.get<std::string>();
    } else if (value.is_array()) {
      std::cout << key << " (" << value.size() << ")\n";
      if (!value.empty()) print_table(value);
    } else {
      std::cout << std::left << std::setw(12) << key << cell(key, value)
                << "\n";
    }
  }
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
    print(description);
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
