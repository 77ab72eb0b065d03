// Adapters of low rank to and from PEFT's folder: adapter_config.json and
// adapter_model.safetensors.
//
// Errors: TS_CHECK_CONFIG on a folder whose adapters are of another kind or for
//         another model, by the names of what differs; TS_CHECK_IO on files
//         that cannot be read.
#pragma once

#include <string>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/model.h"

namespace tessera::checkpoint {

// It has adapter_config.json.
bool is_peft_folder(const std::string& folder);

// The model that the folder's adapters are for, as it says; "": it does not.
std::string base_of_peft(const std::string& folder);

// Rank, alpha and targets of the folder's adapters. A layer that this model has
// as n layers may have n times both: see save_peft().
models::LoraConfig read_peft_config(const std::string& folder);

// That the folder has the adapters of this model, those that its configuration
// names, of finite numbers. Needs the memory of one tensor. A warning where
// PEFT's adapter of one layer is that of several here.
void check_peft(const std::string& folder, models::Model& model);

// Fills this rank's part of the adapters, which must be materialised.
void load_peft(const std::string& folder, models::Model& model,
               const mesh::DeviceMesh& mesh = {},
               const mesh::Coord& coord = {});

// TS_CHECK_CONFIG on adapters that PEFT would lose.
void check_peft_has_adapters_of(const models::ModelConfig& config);

// Writes the adapters of a model beside weights in `base`, a folder or a name:
// of those that pass this check. Where the folder has one layer in place of n
// (q, k and v; gate and up), its adapter has n times the rank and alpha, in
// rank_pattern and alpha_pattern: what PEFT computes is the same.
void save_peft(const std::string& folder, const models::ModelConfig& config,
               const WholeParameter& whole, const std::string& base,
               at::ScalarType dtype);

}  // namespace tessera::checkpoint
