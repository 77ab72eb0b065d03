#include "tessera/checkpoint/peft_folder.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <set>
#include <string_view>

#include "tessera/checkpoint/detail/narrowing.h"
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

constexpr const char* kConfigFile = "/adapter_config.json";
constexpr const char* kWeightFile = "/adapter_model.safetensors";
constexpr const char* kBase = "base_model_name_or_path";
constexpr const char* kPrefix = "base_model.model.";
constexpr size_t kNamedAtMost = 8;  // tensors in a message
// Keys that may say anything: what is told apart here by a line of its own, of
// whom and for whom the adapters are, and what only counts beside another key
// that is refused, or before adapters are trained. Any other key may make them
// adapters of another kind.
constexpr std::string_view kHarmless[] = {"peft_type",
                                          "init_lora_weights",
                                          "bias",
                                          "r",
                                          "lora_alpha",
                                          "lora_dropout",
                                          "target_modules",
                                          "task_type",
                                          "auto_mapping",
                                          kBase,
                                          "revision",
                                          "peft_version",
                                          "inference_mode",
                                          "fan_in_fan_out",
                                          "merge_weights",
                                          "runtime_config",
                                          "layers_pattern",
                                          "megatron_core",
                                          "qalora_group_size",
                                          "loftq_config",
                                          "eva_config",
                                          "corda_config",
                                          "lora_ga_config"};

// "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".
std::string tensor_name(const models::ModelConfig& model,
                        const std::string& parameter) {
  const auto source = models::hugging_face_source(model, parameter);
  TS_CHECK_CONFIG(
      source.widths.empty(), "model.lora: PEFT has one adapter for ",
      source.tensor, ", where this model has ", source.widths.size(),
      ": they are not the same. Of such layers adapters are merged: convert's "
      "--merge here, merge_and_unload() in PEFT. Or target other layers.");
  return kPrefix + source.tensor + ".weight";
}

std::vector<nn::Parameter> adapters_of(models::Model& model) {
  auto parameters = nn::parameters_of(model);
  std::erase_if(parameters,
                [](const auto& each) { return !each.spec->is_adapter; });
  return parameters;
}

// What they are beside, by names in Hugging Face folders.
std::set<std::string> layers_of(const models::ModelConfig& config,
                                const std::vector<nn::Parameter>& adapters) {
  std::set<std::string> layers;
  for (const auto& parameter : adapters) {
    const std::string layer = tensor_name(config, parameter.name)
                                  .substr(std::string_view(kPrefix).size());
    layers.insert(layer.substr(0, layer.rfind(".lora_")));
  }
  return layers;
}

Json config_of(const std::string& folder) {
  const std::string path = folder + kConfigFile;
  Json json =
      tessera::detail::parse_json(tessera::detail::read_json_text(path), path);
  TS_CHECK_CONFIG(json.is_object(), path, ": must be a JSON object.");
  return json;
}

// Null, false, "", [] and {} all say that there is none.
bool is_nothing(const Json& json, const char* key) {
  if (!json.contains(key)) return true;
  const Json& value = json[key];
  return value.is_null() || value == Json(false) || value == Json("") ||
         ((value.is_array() || value.is_object()) && value.empty());
}

void refuse_other_kinds(const Json& json, const std::string& path) {
  const auto refuse = [&](bool holds, const char* key) {
    TS_CHECK_CONFIG(holds, path, ": ", key, " is ",
                    json.contains(key) ? json[key].dump() : "absent",
                    ", which is not supported. Use adapters of plain LoRA.");
  };
  refuse(json.contains("peft_type") && json["peft_type"] == "LORA",
         "peft_type");
  // Others begin from weights that they change: the adapters fit those alone.
  const bool plain_start = is_nothing(json, "init_lora_weights") ||
                           json["init_lora_weights"].is_boolean() ||
                           json["init_lora_weights"] == "gaussian";
  refuse(plain_start, "init_lora_weights");
  refuse(is_nothing(json, "bias") || json["bias"] == "none", "bias");
  for (const auto& item : json.items()) {
    const bool is_harmless =
        std::ranges::find(kHarmless, item.key()) != std::end(kHarmless);
    refuse(is_harmless || is_nothing(json, item.key().c_str()),
           item.key().c_str());
  }
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

// The layers that have adapters, by their names in Hugging Face folders.
std::vector<std::string> layers_in(const SafetensorsFile& file) {
  const std::string beginning = kPrefix, end = ".lora_A.weight";
  std::vector<std::string> layers;
  for (const auto& tensor : file.tensors()) {
    const std::string& name = tensor.name;
    if (!name.starts_with(beginning) || !name.ends_with(end)) continue;
    layers.push_back(name.substr(beginning.size(),
                                 name.size() - beginning.size() - end.size()));
  }
  return layers;
}

// As PEFT matches them: a whole name, or its end behind a dot. A pattern, which
// is a text, is left to PEFT.
void check_targets(const std::string& folder, const Json& config,
                   models::Model& model) {
  if (is_nothing(config, "target_modules") ||
      !config["target_modules"].is_array()) {
    return;
  }
  const auto is_named = [&](const std::string& layer) {
    return std::ranges::any_of(config["target_modules"], [&](const Json& name) {
      const std::string target = name.is_string() ? name : Json("");
      return layer == target || layer.ends_with("." + target);
    });
  };
  const auto held = layers_in(SafetensorsFile(folder + kWeightFile));
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
  const std::string between =
      c10::str(folder, kConfigFile, ": target_modules and the adapters in ",
               folder, kWeightFile, " disagree: ");
  TS_CHECK_CONFIG(not_named.empty(), between, "not named is ",
                  some_of(not_named, kNamedAtMost),
                  ". Save both from the same model.");
  TS_CHECK_CONFIG(not_held.empty(), between, "without adapters is ",
                  some_of(not_held, kNamedAtMost),
                  ". Save both from the same model.");
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
  return std::filesystem::is_regular_file(folder + kConfigFile);
}

std::string base_of_peft(const std::string& folder) {
  const Json json = config_of(folder);
  const auto base = json.find(kBase);
  const bool is_said = base != json.end() && base->is_string();
  return is_said ? base->get<std::string>() : "";
}

models::LoraConfig read_peft_config(const std::string& folder) {
  const std::string path = folder + kConfigFile;
  const Json json = config_of(folder);
  refuse_other_kinds(json, path);
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
  lora.targets = layers_in(SafetensorsFile(folder + kWeightFile));
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
  std::set<std::string> unknown;
  for (const auto& tensor : file.tensors()) unknown.insert(tensor.name);
  std::vector<std::string> complaints;
  for (const auto& parameter : adapters_of(model)) {
    const std::string name = tensor_name(model.config(), parameter.name);
    unknown.erase(name);
    const auto* found = file.find(name);
    const auto& shape = parameter.spec->layout.global_shape();
    if (found == nullptr) {
      complaints.push_back("missing \"" + name + "\"");
    } else if (found->shape != shape) {
      complaints.push_back(c10::str("\"", name, "\" is ",
                                    at::IntArrayRef(found->shape),
                                    ", expected ", at::IntArrayRef(shape)));
    }
  }
  for (const auto& name : unknown) {
    complaints.push_back("unexpected \"" + name + "\"");
  }
  const Json json = config_of(folder);
  TS_CHECK_CONFIG(complaints.empty(), folder,
                  ": these adapters are for another model",
                  json.contains(kBase) ? " (" + json[kBase].dump() + ")" : "",
                  ": ", some_of(complaints, kNamedAtMost), ".");
  check_targets(folder, json, model);
  check_finite(folder, file);
}

void load_peft(const std::string& folder, models::Model& model,
               const mesh::DeviceMesh& mesh, const mesh::Coord& coord) {
  const at::NoGradGuard no_grad;
  const SafetensorsFile file(folder + kWeightFile);
  for (auto& parameter : adapters_of(model)) {
    const mesh::Box box = parameter.spec->layout.local_box(mesh, coord);
    if (box.empty()) continue;
    const std::string name = tensor_name(model.config(), parameter.name);
    parameter.tensor.copy_(file.read_box(name, box));
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
  bool is_transposed = false;
  for (const auto& parameter : adapters) {
    tensors[tensor_name(config, parameter.name)] = detail::narrowed(
        whole(parameter.name, {}).detach(), dtype, parameter.name);
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
                     {kBase, base},
                     {"r", config.lora.rank},
                     {"lora_alpha", config.lora.alpha},
                     {"lora_dropout", 0.0},
                     {"target_modules", layers},
                     {"bias", "none"},
                     {"fan_in_fan_out", is_transposed},
                     {"inference_mode", true}};
  write_file_atomic(folder + kConfigFile, json.dump(2) + "\n");
  write_safetensors(folder + kWeightFile, specs, {{"format", "pt"}},
                    [&](const std::string& name) { return tensors.at(name); });
  sync_path(folder);
}

}  // namespace tessera::checkpoint
