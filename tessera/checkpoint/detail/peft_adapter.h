// Where the adapters of a model lie in a PEFT folder.
//
// PEFT has one adapter beside a layer. Where the model has n layers in place of
// it (GPT-2's c_attn is q, k and v), n adapters of rank r are one of rank n r,
// with an alpha n times as large:
//
//   A = [A_q; A_k; A_v],  B = diag(B_q, B_k, B_v)
//
// PEFT's own of such a layer has the rank of any other: all n begin from its A,
// and have their rows of B.
//
// Symbols: Hu et al. 2021, arXiv 2106.09685.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/mesh/layout.h"
#include "tessera/models/model_config.h"

namespace tessera::checkpoint::detail {

struct PeftAdapter {
  std::string layer;   // "transformer.h.0.attn.c_attn"
  std::string tensor;  // "base_model.model." + layer + ".lora_A.weight"
  bool is_a = false;   // (rank, in); else B, (out, rank)
  int64_t rank = 0;    // of ours
  int64_t part = 0, num_parts = 1;
  int64_t first_row = 0;   // of B
  int64_t other_side = 0;  // in, or out of all parts

  // Of the stored tensor, of this rank or num_parts times as much.
  std::vector<int64_t> stored_shape(int64_t stored_rank) const;
  // The box of it that holds `box` of ours.
  mesh::Box stored_box(mesh::Box box, int64_t stored_rank) const;
};

// REQUIRES: `parameter` is an adapter of the model, of that whole shape.
PeftAdapter peft_adapter(const models::ModelConfig& model,
                         const std::string& parameter,
                         const std::vector<int64_t>& shape);

// The layers that have adapters in adapter_model.safetensors, by their names in
// Hugging Face folders.
std::vector<std::string> peft_layers(const SafetensorsFile& file);
// Of the layer's adapter there; 0: it has none.
int64_t peft_rank(const SafetensorsFile& file, const std::string& layer);

}  // namespace tessera::checkpoint::detail
