// Weights to and from a Hugging Face folder.
//
// Reads:  model.safetensors, or where there is none the files of
//         model.safetensors.index.json, of any floating dtype. Every rank reads
//         its own boxes alone.
// Writes: config.json, generation_config.json and one model.safetensors with
//         {"format": "pt"}, or several and their index, as transformers splits
//         large ones; tokenizer files are the caller's.
// Comm:   none; whoever writes is handed whole tensors.
// Errors: missing, unexpected and mis-shaped tensors are TS_CHECK_IO, all named
//         in one message.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/hugging_face_config.h"
#include "tessera/models/model.h"

namespace tessera::checkpoint {

// True where `folder` holds a config.json of a model.
bool is_hugging_face_folder(const std::string& folder);

// The folder's configuration; of multi-token prediction no modules where its
// weights have no tensor of them, as those that transformers writes have none,
// whatever config.json says. Without weights as config.json says.
models::HuggingFaceConfig hugging_face_config(const std::string& folder);

// That the folder's weights are those of the model, which needs no memory.
void check_hugging_face(const std::string& folder, models::Model& model);

// Fills the parameters, which must be materialised, from the folder's weights.
void load_hugging_face(const std::string& folder, models::Model& model,
                       const mesh::DeviceMesh& mesh = {},
                       const mesh::Coord& coord = {});

// The model of the folder's configuration, on one rank, with its weights.
std::shared_ptr<models::Model> model_from_hugging_face(
    const std::string& folder, at::ScalarType dtype,
    at::Device device = at::kCPU);
// Of that one, which may leave modules of multi-token prediction out.
std::shared_ptr<models::Model> model_from_hugging_face(
    const std::string& folder, const models::ModelConfig& config,
    at::ScalarType dtype, at::Device device = at::kCPU);

// The parameter of that name, whole, or of stacked experts one; of any dtype,
// on any device. Asked for one at a time, in the order of the file.
using WholeParameter = std::function<at::Tensor(const std::string& name,
                                                std::optional<int64_t> expert)>;

// Of a model that one rank holds whole.
WholeParameter parameters_of(models::Model& model);
// Of the folder's weights, which are that model's: read when they are asked
// for, so that they need not fit into memory.
WholeParameter parameters_in(const std::string& folder,
                             const models::ModelConfig& config,
                             at::ScalarType dtype);

// Of tensors in one file, but for one that is larger by itself.
inline constexpr int64_t kMaxShardBytes = 5'000'000'000;

// Writes the folder, which is made where it is missing; files of these names
// are replaced. `config.dtype` is that of the weights.
// Errors: also TS_CHECK_CONFIG on a number that is infinite in that dtype.
void save_hugging_face(const std::string& folder,
                       const models::HuggingFaceConfig& config,
                       const WholeParameter& whole,
                       int64_t max_shard_bytes = kMaxShardBytes);

}  // namespace tessera::checkpoint
