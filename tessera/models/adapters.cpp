#include "tessera/models/adapters.h"

#include <ATen/ATen.h>
#include <fnmatch.h>

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/models/hugging_face_names.h"

namespace tessera::models {
namespace {

constexpr size_t kNamedAtMost = 16;  // layers in a message

// Its name in Hugging Face folders.
std::string their_name(const ModelConfig& model, const std::string& name) {
  const std::string weight = ".weight";
  const auto source = find_hugging_face_source(model, name + weight);
  if (!source) return "";
  return source->tensor.substr(0, source->tensor.size() - weight.size());
}

// A pattern is of a whole name, or of its end behind a dot.
bool matches(const std::string& pattern, const std::string& name) {
  return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0 ||
         ::fnmatch(("*." + pattern).c_str(), name.c_str(), 0) == 0;
}

// Beyond it an adapter has more weights than what it is beside.
void check_rank(int64_t rank, const std::vector<NamedLinear>& layers) {
  int64_t largest = 0;
  for (const auto& layer : layers) {
    const auto& options = layer.linear->options();
    largest = std::max(largest, std::min(options.in, options.out));
  }
  TS_CHECK_CONFIG(
      rank <= largest, "model.lora.rank is ", rank, ", above ", largest,
      ", the smaller side of the largest weights that have adapters: they "
      "would be of full rank. Give a lower one, such as ",
      std::max<int64_t>(1, largest / 2),
      ", or train all weights (model.lora.rank=0).");
}

bool is_meant(const std::string& target, const ModelConfig& config,
              const NamedLinear& layer) {
  return matches(target, layer.name) ||
         matches(target, their_name(config, layer.name));
}

bool names_one(const std::string& target, const ModelConfig& config,
               const std::vector<NamedLinear>& layers) {
  return std::ranges::any_of(layers, [&](const auto& layer) {
    return is_meant(target, config, layer);
  });
}

}  // namespace

std::vector<NamedLinear> adaptable_linears(Model& model) {
  std::vector<NamedLinear> found;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    auto linear = std::dynamic_pointer_cast<nn::Linear>(item.value());
    if (!linear) continue;
    const auto kind = linear->options().role.kind;
    using Kind = nn::Role::Kind;
    if (kind != Kind::kColumn && kind != Kind::kRow) continue;
    found.push_back({item.key(), std::move(linear)});
  }
  return found;
}

std::vector<NamedLinear> adapted_linears(Model& model) {
  auto found = adaptable_linears(model);
  std::erase_if(found,
                [](const auto& each) { return !each.linear->has_adapter(); });
  return found;
}

void add_adapters(Model& model) {
  const LoraConfig& lora = model.config().lora;
  if (lora.rank == 0) return;
  const auto layers = adaptable_linears(model);
  for (const auto& target : lora.targets) {
    std::vector<std::string> names;
    for (const auto& layer : layers) names.push_back(layer.name);
    TS_CHECK_CONFIG(names_one(target, model.config(), layers),
                    "model.lora.targets: \"", target,
                    "\" names no linear layer of the blocks. They are ",
                    some_of(names, kNamedAtMost), ".");
  }
  for (const auto& parameter : nn::parameters_of(model)) {
    parameter.spec->is_frozen = true;
  }
  std::vector<NamedLinear> targets = layers;
  std::erase_if(targets, [&](const auto& layer) {
    return !lora.targets.empty() &&
           std::ranges::none_of(lora.targets, [&](const std::string& target) {
             return is_meant(target, model.config(), layer);
           });
  });
  check_rank(lora.rank, targets);
  for (const auto& layer : targets) {
    layer.linear->add_adapter(lora.rank, lora.scale());
  }
}

void drop_lost_targets(ModelConfig& config) {
  if (config.lora.targets.empty()) return;
  ModelConfig plain = config;
  plain.lora = {};
  const auto model = make_model(plain);
  const auto layers = adaptable_linears(*model);
  std::erase_if(config.lora.targets, [&](const std::string& target) {
    return !names_one(target, config, layers);
  });
}

}  // namespace tessera::models
