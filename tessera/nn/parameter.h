// Parameters with a layout: a block declares what a parameter is, globally; a
// mesh later decides which part of it lives here.
//
// Order:  construct the blocks; let strategies change the layouts of
//         parameters_of(root); materialise(root) once. Until then a parameter
//         is an empty tensor, and a block must not run.
// Bits:   element i of parameter p is a pure function of (seed, p's name, i):
//         any box of any mesh holds the bits of the whole tensor. Of stacked
//         experts each has its own name and count.
// Shapes: global shapes in declarations, local ones in tensors.
// Comm:   none: every rank fills its own box.
// Threads: a module belongs to one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/layout.h"

namespace tessera::nn {

struct Init {
  enum class Kind { kZeros, kOnes, kNormal, kUniform };
  Kind kind = Kind::kZeros;
  double std = 0.0;  // of kNormal, whose mean is 0; kUniform: from -std to std

  static Init zeros() { return {}; }
  static Init ones() { return {Kind::kOnes, 0.0}; }
  static Init normal(double std) { return {Kind::kNormal, std}; }
  static Init uniform(double bound) { return {Kind::kUniform, bound}; }
};

// What a parameter is to its block. Strategies decide from it where the
// parameter lives, and know no block and no name.
struct Role {
  enum class Kind {
    kWhole,       // is used whole on every token: norms, biases behind a sum
    kColumn,      // dim 0 counts output features, which may be shared out
    kRow,         // (out, in): input features: parts compute parts of a sum
    kVocabulary,  // dim 0 counts the vocabulary's entries
    kPerHead,     // is used whole on each of the heads that are here
    kInParts,     // is used whole in parts of a sum, or of the features
    kRouter,      // is used whole on tokens for the experts that are here
  };
  Kind kind = Kind::kWhole;
  // Of kColumn: the features of so many heads, which stay whole; 0: of none.
  int64_t heads = 0;
  // Dim 0 counts experts, and the rest is as if each were alone.
  bool of_experts = false;

  static Role column(int64_t heads = 0) { return {Kind::kColumn, heads}; }
  static Role row() { return {Kind::kRow}; }
  static Role vocabulary() { return {Kind::kVocabulary}; }
  static Role per_head() { return {Kind::kPerHead}; }
  static Role in_parts() { return {Kind::kInParts}; }
  static Role router() { return {Kind::kRouter}; }
};

struct ParameterSpec {
  mesh::Layout layout;  // replicated on every axis until a strategy says else
  Init init;
  Role role = {};
  bool is_frozen = false;   // has no gradient, and is not updated
  bool is_adapter = false;  // of LoRA: beside the weights of a folder
  // Its gradient is no derivative: it is in no norm, and its sign alone counts.
  bool balances_load = false;
  // The units of its model that compute with it, the first of which owns it:
  // set by the model.
  std::vector<int64_t> units = {};

  // The type that it and its gradient have where the model's are of `type`:
  // what balances experts moves by less than narrow types tell apart.
  at::ScalarType type_in(at::ScalarType type) const {
    const bool is_narrow = balances_load && c10::isReducedFloatingType(type);
    return is_narrow ? at::kFloat : type;
  }
};

// A module whose parameters are declared by their global shapes.
class Block : public torch::nn::Module {
 public:
  // The spec of a parameter of this block alone, by its own name.
  std::shared_ptr<ParameterSpec> spec(const std::string& name) const;

 protected:
  using torch::nn::Module::Module;
  // The tensor stays this handle for good: materialise() gives it its memory.
  at::Tensor declare_parameter(const std::string& name,
                               std::vector<int64_t> global_shape, Init init,
                               Role role = {});

 private:
  std::map<std::string, std::shared_ptr<ParameterSpec>> specs_;
};

struct Parameter {
  std::string name;  // "blocks.3.mlp.up.weight"
  std::shared_ptr<ParameterSpec> spec;
  at::Tensor tensor;
};

// Of a parameter that stacks experts, the names that they have one by one, in
// Hugging Face folders and in older checkpoints: "moe.experts.3.gate.weight" of
// "moe.experts.gate.weight". Of any other none.
std::vector<std::string> names_of_experts(const std::string& parameter,
                                          const mesh::Layout& layout);

// Every parameter below `root` in the order of declaration, a tied one once
// (under its first name). One of a module that is no Block is described as it
// is: replicated, of its own shape.
std::vector<Parameter> parameters_of(torch::nn::Module& root);

// Zeros for a parameter's box; they may lie anywhere on the CPU.
using ParameterMemory = std::function<at::Tensor(
    const Parameter& parameter, at::IntArrayRef sizes, at::ScalarType type)>;

struct MaterialiseOptions {
  uint64_t seed = 0;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  // False leaves the memory unset, for weights that are read from files; those
  // that are beside them, adapters, are filled all the same.
  bool fill = true;
  ParameterMemory memory = nullptr;  // null: LibTorch's
};

// Allocates the box that the rank at `coord` holds of every parameter, and
// fills it by its Init.
void materialise(torch::nn::Module& root, const mesh::DeviceMesh& mesh,
                 const mesh::Coord& coord, const MaterialiseOptions& options);

// On a mesh of one rank.
void materialise(torch::nn::Module& root, const MaterialiseOptions& options);

// Number of elements of all parameters, whole, each once.
int64_t num_parameters(torch::nn::Module& root);

}  // namespace tessera::nn
