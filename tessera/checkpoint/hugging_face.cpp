#include "tessera/checkpoint/hugging_face.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>

#include "tessera/checkpoint/detail/narrowing.h"
#include "tessera/checkpoint/detail/posix_file.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/models/hugging_face_names.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using models::HuggingFaceSource;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr size_t kNamedAtMost = 20;  // tensors in one message

// The names of the folder's weight files, without repetition. What saves a
// single file over several may leave their index behind.
std::set<std::string> weight_files(const std::string& folder) {
  if (fs::exists(folder + "/" + kSingleFile)) return {kSingleFile};
  const std::string index = folder + "/" + kIndexFile;
  TS_CHECK_IO(fs::exists(index), folder, ": holds neither ", kSingleFile,
              " nor ", kIndexFile, ".");
  const auto json = tessera::detail::parse_json(
      tessera::detail::read_json_text(index), index);
  TS_CHECK_IO(json.is_object() && json.contains("weight_map") &&
                  json["weight_map"].is_object(),
              index, ": \"weight_map\" is missing or is no object.");
  std::set<std::string> files;
  for (const auto& item : json["weight_map"].items()) {
    const std::string file =
        tessera::detail::as_string(item.value(), index + ": " + item.key());
    TS_CHECK_IO(fs::path(file).filename() == file, index, ": \"", file,
                "\" is no file of this folder.");
    files.insert(file);
  }
  return files;
}

// All tensors of a folder's files, by name, and which of them were asked for.
class Weights {
 public:
  explicit Weights(const std::string& folder, std::string prefix)
      : folder_(folder), prefix_(std::move(prefix)) {
    for (const auto& file : weight_files(folder)) {
      const SafetensorsFile opened(folder + "/" + file);
      for (const auto& entry : opened.tensors()) {
        const bool is_new = by_name_.emplace(entry.name, opened).second;
        TS_CHECK_IO(is_new, opened.path(), ": tensor \"", entry.name,
                    "\" is also in another file of the folder.");
      }
    }
  }

  bool has_any(const std::function<bool(const std::string&)>& is_one) const {
    return std::ranges::any_of(
        by_name_, [&](const auto& entry) { return is_one(entry.first); });
  }

  // A base model's files carry names without the prefix.
  std::string stored_name(const std::string& name) const {
    const bool bare = !by_name_.contains(name) && name.starts_with(prefix_) &&
                      by_name_.contains(name.substr(prefix_.size()));
    return bare ? name.substr(prefix_.size()) : name;
  }

  // Notes what speaks against reading `ours` from `source`.
  void expect(const HuggingFaceSource& source,
              const std::vector<int64_t>& ours) {
    const std::string name = stored_name(source.tensor);
    asked_.insert(name);
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) {
      note("missing \"" + source.tensor + "\"");
      return;
    }
    const auto& stored = *found->second.find(name);
    const auto shape = source.stored_shape(ours);
    if (stored.shape == shape && at::isFloatingType(stored.dtype)) return;
    note("\"" + name + "\" is " + describe(stored) + ", expected " +
         c10::str(at::IntArrayRef(shape)) + " of a floating type");
  }

  at::Tensor read(const HuggingFaceSource& source, const mesh::Box& box) const {
    const std::string name = stored_name(source.tensor);
    return source.turned(
        by_name_.at(name).read_box(name, source.stored_box(box)));
  }

  // The file of what was read.
  const SafetensorsFile& file_of(const HuggingFaceSource& source) const {
    return by_name_.at(stored_name(source.tensor));
  }

  // What is shared may be stored once more; it must then be the same.
  void expect_copy(const std::string& of, const std::string& original,
                   const char* why) {
    const std::string copy = stored_name(of);
    if (!by_name_.contains(copy)) return;
    asked_.insert(copy);
    const std::string name = stored_name(original);
    if (!by_name_.contains(name)) return;
    if (!at::equal(by_name_.at(copy).tensor(copy),
                   by_name_.at(name).tensor(name))) {
      note("\"" + copy + "\" differs from \"" + name + "\", although " + why);
    }
  }

  void throw_complaints(const models::ModelConfig& config) {
    for (const auto& [name, file] : by_name_) {
      if (!asked_.contains(name) && !models::is_hugging_face_buffer(name) &&
          !models::is_of_module_left_out(config, name)) {
        note("unexpected \"" + name + "\"");
      }
    }
    std::string list;
    for (size_t i = 0; i < complaints_.size() && i < kNamedAtMost; ++i) {
      list += "\n  " + complaints_[i];
    }
    if (complaints_.size() > kNamedAtMost) {
      list += c10::str("\n  and ", complaints_.size() - kNamedAtMost, " more");
    }
    TS_CHECK_IO(complaints_.empty(), folder_, ": ", complaints_.size(),
                " tensors do not fit config.json:", list,
                config.mtp.layers > 0
                    ? "\nmodel.mtp.layers 0 reads it without what predicts "
                      "further ahead."
                    : "");
  }

 private:
  void note(std::string complaint) {
    if (noted_.insert(complaint).second) {
      complaints_.push_back(std::move(complaint));
    }
  }

  std::string folder_;
  std::string prefix_;
  std::map<std::string, SafetensorsFile> by_name_;
  std::set<std::string> asked_;
  std::set<std::string> noted_;
  std::vector<std::string> complaints_;
};

// A parameter as the folder has it: whole, or of stacked experts one.
struct Item {
  std::string name;  // as hugging_face_source() knows it
  std::vector<int64_t> shape;
  std::optional<int64_t> expert = {};
};

std::vector<Item> items_of(const nn::Parameter& parameter) {
  const auto& layout = parameter.spec->layout;
  const auto& shape = layout.global_shape();
  std::vector<Item> items;
  for (auto& name : nn::names_of_experts(parameter.name, layout)) {
    items.push_back({std::move(name),
                     {shape.begin() + 1, shape.end()},
                     static_cast<int64_t>(items.size())});
  }
  if (items.empty()) items.push_back({parameter.name, shape});
  return items;
}

// The folder's weights, which are those that the model asks for.
Weights checked_weights(const std::string& folder, models::Model& model) {
  const models::ModelConfig& config = model.config();
  Weights weights(folder, models::hugging_face_prefix(config.family));
  const auto source_of = [&](const std::string& name) {
    return models::hugging_face_source(config, name);
  };
  for (const auto& parameter : nn::parameters_of(model)) {
    if (parameter.spec->is_adapter) continue;  // beside the folder's weights
    for (const Item& item : items_of(parameter)) {
      weights.expect(source_of(item.name), item.shape);
    }
  }
  if (config.tie_embeddings) {
    weights.expect_copy(source_of("head.weight").tensor,
                        source_of("embed.tokens.weight").tensor,
                        "config.json ties them");
  }
  for (const auto& copy : models::hugging_face_copies(config)) {
    weights.expect_copy(copy.tensor, source_of(copy.parameter).tensor,
                        "modules of multi-token prediction share it");
  }
  weights.throw_complaints(config);
  return weights;
}

// Reads this rank's boxes.
void fill(models::Model& model, const Weights& weights,
          const mesh::DeviceMesh& mesh, const mesh::Coord& coord) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : nn::parameters_of(model)) {
    const auto& layout = parameter.spec->layout;
    const mesh::Box box = layout.local_box(mesh, coord);
    if (box.empty() || parameter.spec->is_adapter) continue;
    for (const Item& item : items_of(parameter)) {
      mesh::Box part = box;
      at::Tensor here = parameter.tensor;
      if (item.expert) {
        const int64_t place = *item.expert - box.offset[0];
        if (place < 0 || place >= box.size[0]) continue;
        here = here.select(0, place);
        part.offset.erase(part.offset.begin());
        part.size.erase(part.size.begin());
      }
      const auto source =
          models::hugging_face_source(model.config(), item.name);
      here.copy_(weights.read(source, part));
      weights.file_of(source).require_unchanged();
    }
  }
}

// One tensor of the file: what of our parameters it is made of.
struct Stored {
  struct Part {
    std::string parameter;
    Item item;
    HuggingFaceSource source;
  };
  TensorSpec spec;
  std::vector<Part> parts;
};

std::map<std::string, Stored> stored_tensors(
    const models::HuggingFaceConfig& config) {
  const auto model = models::make_model(config.model);
  std::map<std::string, Stored> tensors;
  const auto copies = models::hugging_face_copies(model->config());
  for (const auto& parameter : nn::parameters_of(*model)) {
    for (const auto& copy : copies) {
      if (copy.parameter != parameter.name) continue;
      const Item whole{parameter.name, parameter.spec->layout.global_shape()};
      tensors[copy.tensor] = {{copy.tensor, config.dtype, whole.shape},
                              {{parameter.name, whole, {copy.tensor}}}};
    }
    for (const Item& item : items_of(parameter)) {
      const auto source =
          models::hugging_face_source(model->config(), item.name);
      auto& stored = tensors[source.tensor];
      // A bias that balances experts transformers keeps in fp32, always.
      stored.spec = {source.tensor,
                     parameter.spec->balances_load ? at::kFloat : config.dtype,
                     source.stored_shape(item.shape)};
      stored.parts.push_back({parameter.name, item, source});
    }
  }
  return tensors;
}

using Shards = std::vector<std::vector<TensorSpec>>;

// In the order of their names, each as full as it may be.
Shards shards_of(const std::map<std::string, Stored>& tensors,
                 int64_t max_bytes) {
  Shards shards(1);
  int64_t bytes = 0;
  for (const auto& [name, stored] : tensors) {
    const int64_t more = stored.spec.bytes();
    if (!shards.back().empty() && bytes + more > max_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().push_back(stored.spec);
    bytes += more;
  }
  return shards;
}

std::string name_of_shard(size_t index, size_t count) {
  if (count == 1) return kSingleFile;
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors",
                index + 1, count);
  return name.data();
}

std::string index_of(const Shards& shards) {
  int64_t bytes = 0;
  tessera::detail::Json files;
  for (size_t i = 0; i < shards.size(); ++i) {
    for (const TensorSpec& tensor : shards[i]) {
      files[tensor.name] = name_of_shard(i, shards.size());
      bytes += tensor.bytes();
    }
  }
  const tessera::detail::Json index = {{"metadata", {{"total_size", bytes}}},
                                       {"weight_map", files}};
  return index.dump(2) + "\n";
}

at::Tensor assemble(const Stored& stored, const WholeParameter& whole) {
  std::vector<at::Tensor> parts(stored.parts.size());
  for (const auto& [parameter, item, source] : stored.parts) {
    const at::Tensor values = whole(parameter, item.expert).detach();
    parts.at(source.part) =
        source.turned(detail::narrowed(values, stored.spec.dtype, item.name));
  }
  if (parts.size() == 1) return parts[0];
  const bool transposed = stored.parts[0].source.transposed;
  return at::cat(parts, transposed && parts[0].dim() == 2 ? 1 : 0);
}

}  // namespace

bool is_hugging_face_folder(const std::string& folder) {
  const std::string path = folder + "/config.json";
  if (!fs::is_regular_file(path)) return false;
  const auto json =
      tessera::detail::parse_json(tessera::detail::read_json_text(path), path);
  return json.is_object() && json.contains("model_type");
}

models::HuggingFaceConfig hugging_face_config(const std::string& folder) {
  auto config = models::read_hugging_face_config(folder);
  const bool has_weights = fs::exists(folder + "/" + kSingleFile) ||
                           fs::exists(folder + "/" + kIndexFile);
  if (config.model.mtp.layers == 0 || !has_weights) return config;
  models::ModelConfig alone = config.model;
  alone.mtp.layers = 0;
  const Weights weights(folder,
                        models::hugging_face_prefix(config.model.family));
  if (!weights.has_any([&](const std::string& name) {
        return models::is_of_module_left_out(alone, name);
      })) {
    config.model.mtp.layers = 0;
  }
  return config;
}

void check_hugging_face(const std::string& folder, models::Model& model) {
  checked_weights(folder, model);
}

void load_hugging_face(const std::string& folder, models::Model& model,
                       const mesh::DeviceMesh& mesh, const mesh::Coord& coord) {
  fill(model, checked_weights(folder, model), mesh, coord);
}

std::shared_ptr<models::Model> model_from_hugging_face(
    const std::string& folder, at::ScalarType dtype, at::Device device) {
  return model_from_hugging_face(folder, hugging_face_config(folder).model,
                                 dtype, device);
}

std::shared_ptr<models::Model> model_from_hugging_face(
    const std::string& folder, const models::ModelConfig& config,
    at::ScalarType dtype, at::Device device) {
  auto model = models::make_model(config);
  // Sizes that the files do not bear out are refused before memory is taken.
  const Weights weights = checked_weights(folder, *model);
  nn::materialise(*model, {.dtype = dtype, .device = device, .fill = false});
  fill(*model, weights, {}, {});
  return model;
}

WholeParameter parameters_of(models::Model& model) {
  std::map<std::string, at::Tensor> whole;
  for (const auto& parameter : nn::parameters_of(model)) {
    whole[parameter.name] = parameter.tensor;
  }
  return [whole = std::move(whole)](const std::string& name,
                                    std::optional<int64_t> expert) {
    const at::Tensor& all = whole.at(name);
    return expert ? all.select(0, *expert) : all;
  };
}

WholeParameter parameters_in(const std::string& folder,
                             const models::ModelConfig& config,
                             at::ScalarType dtype) {
  const auto model = models::make_model(config);
  std::map<std::string, std::vector<Item>> items;
  for (const auto& parameter : nn::parameters_of(*model)) {
    items[parameter.name] = items_of(parameter);
  }
  return [items = std::move(items), weights = checked_weights(folder, *model),
          config = model->config(),
          dtype](const std::string& name, std::optional<int64_t> expert) {
    const Item& item = items.at(name).at(expert.value_or(0));
    const auto source = models::hugging_face_source(config, item.name);
    const at::Tensor values = weights.read(source, mesh::Box::whole(item.shape))
                                  .to(dtype, /*non_blocking=*/false,
                                      /*copy=*/true);
    const SafetensorsFile& file = weights.file_of(source);
    file.require_unchanged();
    file.let_go();
    return values;
  };
}

void save_hugging_face(const std::string& folder,
                       const models::HuggingFaceConfig& config,
                       const WholeParameter& whole, int64_t max_shard_bytes) {
  // First of all refuses what such a folder cannot say.
  const std::string json = hugging_face_config_json(config);
  const auto tensors = stored_tensors(config);
  const auto shards = shards_of(tensors, max_shard_bytes);
  write_file_atomic(folder + "/config.json", json);
  write_file_atomic(folder + "/generation_config.json",
                    generation_config_json(config));
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string path = folder + "/" + name_of_shard(i, shards.size());
    fs::remove(path + ".tmp");
    write_safetensors(path + ".tmp", shards[i], {{"format", "pt"}},
                      [&](const std::string& name) {
                        return assemble(tensors.at(name), whole);
                      });
    detail::rename_path(path + ".tmp", path);
  }
  // What was there before is read in place of the new no longer.
  if (shards.size() == 1) {
    fs::remove(folder + "/" + kIndexFile);
  } else {
    write_file_atomic(folder + "/" + kIndexFile, index_of(shards));
    fs::remove(folder + "/" + kSingleFile);
  }
  sync_path(folder);
}

}  // namespace tessera::checkpoint
