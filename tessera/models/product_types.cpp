#include "tessera/models/product_types.h"

#include <functional>

namespace tessera::models {
namespace {

void for_each_linear(Model& model,
                     const std::function<void(nn::Linear&)>& each) {
  using Kind = nn::Role::Kind;
  for (const auto& module : model.modules(/*include_self=*/false)) {
    auto* const linear = module->as<nn::Linear>();
    if (linear == nullptr) continue;
    const Kind kind = linear->options().role.kind;
    if (kind == Kind::kColumn || kind == Kind::kRow || kind == Kind::kInParts) {
      each(*linear);
    }
  }
}

}  // namespace

void set_products(Model& model, nn::ProductType type) {
  for_each_linear(model,
                  [type](nn::Linear& linear) { linear.set_products(type); });
}

Fp8Layers fp8_layers(Model& model) {
  Fp8Layers layers;
  for_each_linear(model, [&layers](const nn::Linear& linear) {
    const at::Tensor& weight = linear.weight();
    if (weight.numel() == 0) return;  // another stage's
    ++layers.all;
    if (nn::takes_fp8(weight.size(0), weight.size(1))) ++layers.taken;
  });
  return layers;
}

}  // namespace tessera::models
