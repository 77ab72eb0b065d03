#include "tessera/checkpoint/peft_folder.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "tessera/checkpoint/detail/narrowing.h"
#include "tessera/checkpoint/detail/peft_adapter.h"
#include "tessera/checkpoint/detail/peft_config.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/models/adapters.h"
#include "tessera/models/hugging_face_names.h"

namespace tessera::checkpoint {
namespace {

using tessera::detail::Json;

constexpr const char* kWeightFile = "/adapter_model.safetensors";
constexpr size_t kNamedAtMost = 8;  // tensors in a message

std::vector<nn::Parameter> adapters_of(models::Model& model) {
  auto parameters = nn::parameters_of(model);
  std::erase_if(parameters,
                [](const auto& each) { return !each.spec->is_adapter; });
  return parameters;
}

detail::PeftAdapter place_of(const models::ModelConfig& config,
                             const nn::Parameter& adapter) {
  return detail::peft_adapter(config, adapter.name,
                              adapter.spec->layout.global_shape());
}

// What they are beside, by names in Hugging Face folders.
std::set<std::string> layers_of(const models::ModelConfig& config,
                                const std::vector<nn::Parameter>& adapters) {
  std::set<std::string> layers;
  for (const auto& adapter : adapters) {
    layers.insert(place_of(config, adapter).layer);
  }
  return layers;
}

// PEFT (0.21) takes these names for those of experts wherever a model has some,
// also in layers and shared experts that have none: what lies there is dropped,
// or the folder refused.
void refuse_what_peft_drops(const models::ModelConfig& model,
                            const std::set<std::string>& layers) {
  if (model.moe.experts == 0) return;
  for (const std::string& layer : layers) {
    for (const char* name : {".gate_proj", ".up_proj", ".down_proj"}) {
      TS_CHECK_CONFIG(
          !layer.ends_with(name), "model.lora: PEFT would take ", layer,
          " for a layer of the model's experts, and drop its "
          "adapter or refuse it. Merge the adapters (tessera convert "
          "--merge), or target other layers.");
    }
  }
}

// As PEFT matches them: a whole name, or its end behind a dot. A pattern, which
// is a text, is left to PEFT.
void check_targets(const std::string& folder, const Json& config,
                   models::Model& model) {
  if (detail::says_nothing(config, "target_modules") ||
      !config["target_modules"].is_array()) {
    return;
  }
  const auto is_named = [&](const std::string& layer) {
    return std::ranges::any_of(config["target_modules"], [&](const Json& name) {
      const std::string target = name.is_string() ? name : Json("");
      return layer == target || layer.ends_with("." + target);
    });
  };
  const auto held = detail::peft_layers(SafetensorsFile(folder + kWeightFile));
  std::vector<std::string> not_named, not_held;
  for (const auto& layer : held) {
    if (!is_named(layer)) not_named.push_back('"' + layer + '"');
  }
  const std::set<std::string> has(held.begin(), held.end());
  for (const auto& each : models::adaptable_linears(model)) {
    const std::string tensor =
        models::hugging_face_source(model.config(), each.name + ".weight")
            .tensor;
    const std::string layer = tensor.substr(0, tensor.rfind(".weight"));
    if (is_named(layer) && !has.contains(layer)) {
      not_held.push_back('"' + layer + '"');
    }
  }
  const std::string between = c10::str(folder, detail::kPeftConfigFile,
                                       ": target_modules and the adapters in ",
                                       folder, kWeightFile, " disagree: ");
  TS_CHECK_CONFIG(not_named.empty(), between, "not named is ",
                  some_of(not_named, kNamedAtMost),
                  ". Save both from the same model.");
  TS_CHECK_CONFIG(not_held.empty(), between, "without adapters is ",
                  some_of(not_held, kNamedAtMost),
                  ". Save both from the same model.");
}

// What is wrong with the stored tensor; "": nothing.
std::string complaint_of(const SafetensorsFile& file,
                         const detail::PeftAdapter& adapter) {
  const auto* found = file.find(adapter.tensor);
  if (found == nullptr) return "missing \"" + adapter.tensor + "\"";
  // A and B have the same, which may be that of all parts.
  const int64_t apart = adapter.rank * adapter.num_parts;
  const int64_t rank =
      detail::peft_rank(file, adapter.layer) == apart ? apart : adapter.rank;
  const auto expected = adapter.stored_shape(rank);
  if (found->shape == expected) return "";
  return c10::str("\"", adapter.tensor, "\" is ", at::IntArrayRef(found->shape),
                  ", expected ", at::IntArrayRef(expected));
}

// Of rank n r the parts are apart in B: elsewhere it is zero.
void check_apart(const std::string& folder, const SafetensorsFile& file,
                 const detail::PeftAdapter& adapter, int64_t num_rows) {
  const int64_t stored = detail::peft_rank(file, adapter.layer);
  if (adapter.is_a || stored == adapter.rank) return;
  const mesh::Box rows{{adapter.first_row, 0}, {num_rows, stored}};
  const at::Tensor values = file.read_box(adapter.tensor, rows);
  const at::Tensor own =
      values.narrow(1, adapter.part * adapter.rank, adapter.rank);
  TS_CHECK_CONFIG(own.count_nonzero().equal(values.count_nonzero()), folder,
                  kWeightFile, ": \"", adapter.tensor, "\" is of rank ", stored,
                  " over all its rows, and this model has ", adapter.num_parts,
                  " layers there, which would need as much each. Set r "
                  "for all layers alike, or target other ones.");
}

// Those that all begin from one of PEFT's, and each go on by themselves.
void tell_parts(const std::string& folder, const SafetensorsFile& file,
                const std::vector<detail::PeftAdapter>& adapters) {
  std::set<std::string> layers;
  for (const auto& adapter : adapters) {
    if (adapter.num_parts > 1 &&
        detail::peft_rank(file, adapter.layer) == adapter.rank) {
      layers.insert('"' + adapter.layer + '"');
    }
  }
  if (layers.empty()) return;
  log::warning(folder, ": of ", some_of({layers.begin(), layers.end()}, 2),
               " this model has several layers each: they begin from the same "
               "lora_A and train one of their own, where PEFT trains one.");
}

void check_finite(const std::string& folder, const SafetensorsFile& file) {
  for (const auto& tensor : file.tensors()) {
    const auto whole = mesh::Box::whole(tensor.shape);
    if (whole.empty()) continue;
    const bool is_finite =
        at::isfinite(file.read_box(tensor.name, whole)).all().item<bool>();
    TS_CHECK_CONFIG(is_finite, folder, kWeightFile, ": \"", tensor.name,
                    "\" holds what is not a finite number. Take adapters of "
                    "a run that did not diverge.");
  }
}

}  // namespace

bool is_peft_folder(const std::string& folder) {
  return std::filesystem::is_regular_file(folder + detail::kPeftConfigFile);
}

std::string base_of_peft(const std::string& folder) {
  const Json json = detail::peft_config(folder);
  const auto base = json.find(detail::kPeftBase);
  const bool is_said = base != json.end() && base->is_string();
  return is_said ? base->get<std::string>() : "";
}

models::LoraConfig read_peft_config(const std::string& folder) {
  const std::string path = folder + detail::kPeftConfigFile;
  const Json json = detail::peft_config(folder);
  detail::refuse_other_kinds(json, path);
  for (const char* key : {"r", "lora_alpha"}) {
    TS_CHECK_CONFIG(json.contains(key), path, ": \"", key, "\" is missing.");
  }
  models::LoraConfig lora;
  lora.from = folder;
  lora.rank = tessera::detail::as_int(json["r"], path + ": r");
  lora.alpha =
      tessera::detail::as_double(json["lora_alpha"], path + ": lora_alpha");
  TS_CHECK_CONFIG(
      lora.rank > 0 && lora.rank <= models::kMaxSize && lora.alpha > 0, path,
      ": r is ", lora.rank, " and lora_alpha ", lora.alpha,
      "; both must be above 0.");
  const SafetensorsFile file(folder + kWeightFile);
  detail::check_peft_patterns(json, file, path);
  lora.targets = detail::peft_layers(file);
  TS_CHECK_CONFIG(!lora.targets.empty(), folder, kWeightFile,
                  ": holds no adapter.");
  if (json.contains("lora_dropout") && json["lora_dropout"] != Json(0.0) &&
      json["lora_dropout"] != Json(0)) {
    log::warning(path, ": lora_dropout is ", json["lora_dropout"].dump(),
                 "; adapters go without dropout of their own, which is not "
                 "built.");
  }
  return lora;
}

void check_peft(const std::string& folder, models::Model& model) {
  const SafetensorsFile file(folder + kWeightFile);
  std::set<std::string> unknown, complaints;
  for (const auto& tensor : file.tensors()) unknown.insert(tensor.name);
  const auto parameters = adapters_of(model);
  std::vector<detail::PeftAdapter> adapters;
  for (const auto& parameter : parameters) {
    adapters.push_back(place_of(model.config(), parameter));
    unknown.erase(adapters.back().tensor);
    complaints.insert(complaint_of(file, adapters.back()));
  }
  complaints.erase("");
  for (const auto& name : unknown) {
    complaints.insert("unexpected \"" + name + "\"");
  }
  const Json json = detail::peft_config(folder);
  TS_CHECK_CONFIG(
      complaints.empty(), folder, ": these adapters are for another model",
      json.contains(detail::kPeftBase)
          ? " (" + json[detail::kPeftBase].dump() + ")"
          : "",
      ": ", some_of({complaints.begin(), complaints.end()}, kNamedAtMost), ".");
  check_targets(folder, json, model);
  check_finite(folder, file);
  for (size_t i = 0; i < adapters.size(); ++i) {
    check_apart(folder, file, adapters[i],
                parameters[i].spec->layout.global_shape()[0]);
  }
  tell_parts(folder, file, adapters);
}

void load_peft(const std::string& folder, models::Model& model,
               const mesh::DeviceMesh& mesh, const mesh::Coord& coord) {
  const at::NoGradGuard no_grad;
  const SafetensorsFile file(folder + kWeightFile);
  for (auto& parameter : adapters_of(model)) {
    const mesh::Box box = parameter.spec->layout.local_box(mesh, coord);
    if (box.empty()) continue;
    const auto place = place_of(model.config(), parameter);
    parameter.tensor.copy_(file.read_box(
        place.tensor,
        place.stored_box(box, detail::peft_rank(file, place.layer))));
  }
}

void check_peft_has_adapters_of(const models::ModelConfig& config) {
  const auto model = models::make_model(config);
  refuse_what_peft_drops(config, layers_of(config, adapters_of(*model)));
}

void save_peft(const std::string& folder, const models::ModelConfig& config,
               const WholeParameter& whole, const std::string& base,
               at::ScalarType dtype) {
  const auto model = models::make_model(config);
  const auto adapters = adapters_of(*model);
  const auto layers = layers_of(config, adapters);
  refuse_what_peft_drops(config, layers);
  std::map<std::string, at::Tensor> tensors;
  Json ranks = Json::object(), alphas = Json::object();
  bool is_transposed = false;
  for (const auto& parameter : adapters) {
    const auto place = place_of(config, parameter);
    const int64_t rank = place.rank * place.num_parts;
    at::Tensor& stored = tensors[place.tensor];
    if (!stored.defined()) stored = at::zeros(place.stored_shape(rank), dtype);
    const auto& shape = parameter.spec->layout.global_shape();
    const auto box = place.stored_box(mesh::Box::whole(shape), rank);
    stored.narrow(0, box.offset[0], box.size[0])
        .narrow(1, box.offset[1], box.size[1])
        .copy_(detail::narrowed(whole(parameter.name, {}).detach(), dtype,
                                parameter.name));
    if (place.num_parts > 1) {
      ranks[place.layer] = rank;
      alphas[place.layer] =
          config.lora.alpha * static_cast<double>(place.num_parts);
    }
    const size_t dot = parameter.name.rfind('.');
    is_transposed |= models::hugging_face_source(
                         config, parameter.name.substr(0, dot) + ".weight")
                         .transposed;
  }
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : tensors) {
    specs.push_back({name, dtype, tensor.sizes().vec()});
  }
  const Json json = {{"peft_type", "LORA"},
                     {"task_type", "CAUSAL_LM"},
                     {detail::kPeftBase, base},
                     {"r", config.lora.rank},
                     {"lora_alpha", config.lora.alpha},
                     {"rank_pattern", ranks},
                     {"alpha_pattern", alphas},
                     {"lora_dropout", 0.0},
                     {"target_modules", layers},
                     {"bias", "none"},
                     {"fan_in_fan_out", is_transposed},
                     {"inference_mode", true}};
  write_file_atomic(folder + detail::kPeftConfigFile, json.dump(2) + "\n");
  write_safetensors(folder + kWeightFile, specs, {{"format", "pt"}},
                    [&](const std::string& name) { return tensors.at(name); });
  sync_path(folder);
}

}  // namespace tessera::checkpoint
