// How the linear layers of a model multiply: as they are, or by fp8
// (nn/fp8_product.h).
#pragma once

#include <cstdint>

#include "tessera/models/model.h"
#include "tessera/nn/fp8_product.h"

namespace tessera::models {

// Of those of attention and of MLPs in the model's blocks. All else stays as it
// is: the head, embeddings, what chooses among experts, the experts, whose
// products are grouped, what is in front of a block that predicts ahead, and
// adapters.
void set_products(Model& model, nn::ProductType type);

// Of those on this rank, how many there are, and of how many the weight is such
// that its products can be of fp8.
struct Fp8Layers {
  int64_t all = 0, taken = 0;
};
Fp8Layers fp8_layers(Model& model);

}  // namespace tessera::models
