#include "tessera/models/product_types.h"

namespace tessera::models {

void set_products(Model& model, nn::ProductType type) {
  using Kind = nn::Role::Kind;
  for (const auto& module : model.modules(/*include_self=*/false)) {
    auto* const linear = module->as<nn::Linear>();
    if (linear == nullptr) continue;
    const Kind kind = linear->options().role.kind;
    if (kind == Kind::kColumn || kind == Kind::kRow || kind == Kind::kInParts) {
      linear->set_products(type);
    }
  }
}

}  // namespace tessera::models
