// Which linear layers of a model have adapters of low rank (LoRA).
//
// Source: Hu et al. 2021, arXiv 2106.09685.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/models/model.h"
#include "tessera/nn/blocks.h"

namespace tessera::models {

// A linear layer by its name, such as "blocks.0.attention.q".
struct NamedLinear {
  std::string name;
  std::shared_ptr<nn::Linear> linear;
};

// Those in the model's blocks that may have one, in their order: not the
// experts', whose weights are stacked, nor what chooses among them.
std::vector<NamedLinear> adaptable_linears(Model& model);
std::vector<NamedLinear> adapted_linears(Model& model);

// Gives the layers of config().lora their adapters, and freezes all else.
// Nothing where its rank is 0. TS_CHECK_CONFIG on a target that names no layer,
// and on a rank above the smaller side of all of them.
void add_adapters(Model& model);

// Of a model that has fewer layers now: targets that name none of them go.
// Where all do, all layers have adapters. REQUIRES: complete().
void drop_lost_targets(ModelConfig& config);

}  // namespace tessera::models
