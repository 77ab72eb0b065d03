#include "tessera/checkpoint/detail/peft_adapter.h"

#include <c10/util/StringUtil.h>

#include <iterator>
#include <numeric>
#include <string_view>

#include "tessera/models/hugging_face_names.h"

namespace tessera::checkpoint::detail {
namespace {

constexpr std::string_view kPrefix = "base_model.model.";
constexpr std::string_view kA = ".lora_A.weight";

}  // namespace

std::vector<int64_t> PeftAdapter::stored_shape(int64_t stored_rank) const {
  if (is_a) return {stored_rank, other_side};
  return {other_side, stored_rank};
}

mesh::Box PeftAdapter::stored_box(mesh::Box box, int64_t stored_rank) const {
  if (!is_a) box.offset[0] += first_row;
  if (stored_rank != rank) box.offset[is_a ? 0 : 1] += part * rank;
  return box;
}

PeftAdapter peft_adapter(const models::ModelConfig& model,
                         const std::string& parameter,
                         const std::vector<int64_t>& shape) {
  const auto source = models::hugging_face_source(model, parameter);
  PeftAdapter adapter;
  adapter.layer = source.tensor.substr(0, source.tensor.rfind(".lora_"));
  adapter.tensor = c10::str(kPrefix, source.tensor, ".weight");
  adapter.is_a = parameter.ends_with(".lora_A");
  adapter.rank = shape[adapter.is_a ? 0 : 1];
  adapter.other_side = shape[adapter.is_a ? 1 : 0];
  if (source.widths.empty()) return adapter;
  adapter.part = static_cast<int64_t>(source.part);
  adapter.num_parts = std::ssize(source.widths);
  const auto first = source.widths.begin();
  adapter.first_row = std::accumulate(first, first + adapter.part, int64_t{0});
  if (!adapter.is_a) {
    adapter.other_side =
        std::accumulate(first, source.widths.end(), int64_t{0});
  }
  return adapter;
}

std::vector<std::string> peft_layers(const SafetensorsFile& file) {
  std::vector<std::string> layers;
  for (const auto& tensor : file.tensors()) {
    const std::string& name = tensor.name;
    if (!name.starts_with(kPrefix) || !name.ends_with(kA)) continue;
    layers.push_back(
        name.substr(kPrefix.size(), name.size() - kPrefix.size() - kA.size()));
  }
  return layers;
}

int64_t peft_rank(const SafetensorsFile& file, const std::string& layer) {
  const auto* found = file.find(c10::str(kPrefix, layer, kA));
  return found == nullptr || found->shape.empty() ? 0 : found->shape[0];
}

}  // namespace tessera::checkpoint::detail
