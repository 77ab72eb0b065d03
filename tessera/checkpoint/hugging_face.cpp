#include "tessera/checkpoint/hugging_face.h"

#include <ATen/ATen.h>

#include <filesystem>
#include <map>
#include <set>

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

// The names of the folder's weight files, without repetition.
std::set<std::string> weight_files(const std::string& folder) {
  const std::string index = folder + "/" + kIndexFile;
  if (!fs::exists(index)) {
    TS_CHECK_IO(fs::exists(folder + "/" + kSingleFile), folder,
                ": holds neither ", kSingleFile, " nor ", kIndexFile, ".");
    return {kSingleFile};
  }
  const auto json = tessera::detail::parse_json(read_file(index), index);
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

  at::Tensor read(const HuggingFaceSource& source, const mesh::Box& box,
                  const std::vector<int64_t>& ours) const {
    const std::string name = stored_name(source.tensor);
    return source.turned(
        by_name_.at(name).read_box(name, source.stored_box(box, ours)));
  }

  // A tied head may be stored as well; it must then be the embedding.
  void expect_copy(const std::string& copy, const std::string& original) {
    if (!by_name_.contains(copy)) return;
    asked_.insert(copy);
    const std::string name = stored_name(original);
    if (!by_name_.contains(name)) return;
    if (!at::equal(by_name_.at(copy).tensor(copy),
                   by_name_.at(name).tensor(name))) {
      note("\"" + copy + "\" differs from \"" + name +
           "\", although config.json ties them");
    }
  }

  void throw_complaints() {
    for (const auto& [name, file] : by_name_) {
      if (!asked_.contains(name) && !models::is_hugging_face_buffer(name)) {
        note("unexpected \"" + name + "\"");
      }
    }
    std::string list;
    for (size_t i = 0; i < complaints_.size() && i < kNamedAtMost; ++i) {
      list += "\n  " + complaints_[i];
    }
    if (complaints_.size() > kNamedAtMost) list += "\n  ...";
    TS_CHECK_IO(complaints_.empty(), folder_, ": ", complaints_.size(),
                " tensors do not fit config.json:", list);
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

// The folder's weights, which are those that the decoder asks for.
Weights checked_weights(const std::string& folder, models::Decoder& decoder) {
  const std::string& family = decoder.config().family;
  Weights weights(folder, models::hugging_face_prefix(family));
  const auto source_of = [&](const std::string& name) {
    return models::hugging_face_source(family, name);
  };
  for (const auto& parameter : nn::parameters_of(decoder)) {
    weights.expect(source_of(parameter.name),
                   parameter.spec->layout.global_shape());
  }
  if (decoder.config().tie_embeddings) {
    weights.expect_copy(source_of("head.weight").tensor,
                        source_of("embed.tokens.weight").tensor);
  }
  weights.throw_complaints();
  return weights;
}

// Reads this rank's boxes.
void fill(models::Decoder& decoder, const Weights& weights,
          const mesh::DeviceMesh& mesh, const mesh::Coord& coord) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : nn::parameters_of(decoder)) {
    const auto& layout = parameter.spec->layout;
    const mesh::Box box = layout.local_box(mesh, coord);
    if (box.empty()) continue;
    const auto source =
        models::hugging_face_source(decoder.config().family, parameter.name);
    parameter.tensor.copy_(weights.read(source, box, layout.global_shape()));
  }
}

// One tensor of the file: our parameters that it is made of, in order.
struct Stored {
  TensorSpec spec;
  std::vector<std::pair<std::string, HuggingFaceSource>> parts;
};

std::map<std::string, Stored> stored_tensors(
    const models::HuggingFaceConfig& config) {
  models::Decoder decoder(config.model);
  std::map<std::string, Stored> tensors;
  for (const auto& parameter : nn::parameters_of(decoder)) {
    const auto source =
        models::hugging_face_source(config.model.family, parameter.name);
    auto& stored = tensors[source.tensor];
    stored.spec = {source.tensor, config.dtype,
                   source.stored_shape(parameter.spec->layout.global_shape())};
    stored.parts.emplace_back(parameter.name, source);
  }
  return tensors;
}

at::Tensor assemble(const Stored& stored, const WholeParameter& whole) {
  std::vector<at::Tensor> parts;
  for (const auto& [name, source] : stored.parts) {
    parts.push_back(source.turned(whole(name).detach().to(stored.spec.dtype)));
  }
  if (parts.size() == 1) return parts[0];
  const bool transposed = stored.parts[0].second.transposed;
  return at::cat(parts, transposed && parts[0].dim() == 2 ? 1 : 0);
}

}  // namespace

bool is_hugging_face_folder(const std::string& folder) {
  const std::string path = folder + "/config.json";
  if (!fs::is_regular_file(path)) return false;
  const auto json = tessera::detail::parse_json(read_file(path), path);
  return json.is_object() && json.contains("model_type");
}

void load_hugging_face(const std::string& folder, models::Decoder& decoder,
                       const mesh::DeviceMesh& mesh, const mesh::Coord& coord) {
  fill(decoder, checked_weights(folder, decoder), mesh, coord);
}

std::shared_ptr<models::Decoder> decoder_from_hugging_face(
    const std::string& folder, at::ScalarType dtype, at::Device device) {
  const auto config = models::read_hugging_face_config(folder);
  auto decoder = std::make_shared<models::Decoder>(config.model);
  // Sizes that the files do not bear out are refused before memory is taken.
  const Weights weights = checked_weights(folder, *decoder);
  nn::materialise(*decoder, {.dtype = dtype, .device = device, .fill = false});
  fill(*decoder, weights, {}, {});
  return decoder;
}

void save_hugging_face(const std::string& folder,
                       const models::HuggingFaceConfig& config,
                       const WholeParameter& whole) {
  const auto tensors = stored_tensors(config);
  std::vector<TensorSpec> specs;
  for (const auto& [name, stored] : tensors) specs.push_back(stored.spec);
  write_file_atomic(folder + "/config.json", hugging_face_config_json(config));
  write_file_atomic(folder + "/generation_config.json",
                    generation_config_json(config));
  const std::string path = folder + "/" + kSingleFile;
  fs::remove(path + ".tmp");
  write_safetensors(path + ".tmp", specs, {{"format", "pt"}},
                    [&](const std::string& name) {
                      return assemble(tensors.at(name), whole);
                    });
  detail::rename_path(path + ".tmp", path);
  fs::remove(folder + "/" + kIndexFile);
  sync_path(folder);
}

void save_hugging_face(const std::string& folder,
                       const models::HuggingFaceConfig& config,
                       models::Decoder& decoder) {
  std::map<std::string, at::Tensor> whole;
  for (const auto& parameter : nn::parameters_of(decoder)) {
    whole[parameter.name] = parameter.tensor;
  }
  save_hugging_face(folder, config,
                    [&](const std::string& name) { return whole.at(name); });
}

}  // namespace tessera::checkpoint
