// Where each parameter of a Decoder lies in a Hugging Face folder.
//
// A parameter of ours is one tensor of theirs, or one of several parts of one
// along its output dim (GPT-2's c_attn and Phi's qkv_proj hold q, k and v),
// possibly stored transposed (GPT-2's Conv1D weights are (in, out)).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/mesh/layout.h"
#include "tessera/models/model_config.h"

namespace tessera::models {

struct HuggingFaceSource {
  std::string tensor;       // "transformer.h.0.attn.c_attn.weight"
  bool transposed = false;  // stored as (in, out)
  size_t part = 0;          // of those of `widths`, along the output dim
  std::vector<int64_t> widths = {};  // none: it is the whole tensor

  // The shape of the stored tensor, given that of our parameter.
  std::vector<int64_t> stored_shape(std::vector<int64_t> ours) const;
  // The box of the stored tensor that holds `box` of our parameter.
  mesh::Box stored_box(mesh::Box box) const;
  // Between the values as stored and as ours; its own inverse, a view.
  at::Tensor turned(const at::Tensor& values) const;
};

// REQUIRES: `model` is complete, and `parameter` a name of its Decoder; of
//           stacked experts one of nn::names_of_experts.
// None: the family's folders have no place for it.
std::optional<HuggingFaceSource> find_hugging_face_source(
    const ModelConfig& model, const std::string& parameter);
// TS_CHECK_CONFIG that they have.
HuggingFaceSource hugging_face_source(const ModelConfig& model,
                                      const std::string& parameter);

// A tensor of the folder that is another one once more.
struct HuggingFaceCopy {
  std::string tensor;
  std::string parameter;  // "embed.tokens.weight", of which it is a copy
};
// Of modules of multi-token prediction: the embedding and the head that they
// share. REQUIRES: `model` is complete.
std::vector<HuggingFaceCopy> hugging_face_copies(const ModelConfig& model);
// Is of such a module, of a model without them.
bool is_of_module_left_out(const ModelConfig& model, const std::string& tensor);

// "transformer." or "model.": base models are also saved without it.
std::string hugging_face_prefix(const std::string& family);
// Tensors that hold no weights (masks, rotary frequencies) and are passed over.
bool is_hugging_face_buffer(const std::string& tensor);

}  // namespace tessera::models
