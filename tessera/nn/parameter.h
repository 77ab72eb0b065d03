// Parameters with a layout: a block declares what a parameter is, globally; a
// mesh later decides which part of it lives here.
//
// Order:  construct the blocks; let strategies change the layouts of
//         parameters_of(root); materialise(root) once. Until then a parameter
//         is an empty tensor, and a block must not run.
// Bits:   element i of parameter p is a pure function of (seed, p's name, i):
//         any box of any mesh holds the bits of the whole tensor.
// Shapes: global shapes in declarations, local ones in tensors.
// Comm:   none: every rank fills its own box.
// Threads: a module belongs to one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/layout.h"

namespace tessera::nn {

struct Init {
  enum class Kind { kZeros, kOnes, kNormal };
  Kind kind = Kind::kZeros;
  double std = 0.0;  // of kNormal, whose mean is 0

  static Init zeros() { return {}; }
  static Init ones() { return {Kind::kOnes, 0.0}; }
  static Init normal(double std) { return {Kind::kNormal, std}; }
};

struct ParameterSpec {
  mesh::Layout layout;  // replicated on every axis until a strategy says else
  Init init;
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
                               std::vector<int64_t> global_shape, Init init);

 private:
  std::map<std::string, std::shared_ptr<ParameterSpec>> specs_;
};

struct Parameter {
  std::string name;  // "blocks.3.mlp.up.weight"
  std::shared_ptr<ParameterSpec> spec;
  at::Tensor tensor;
};

// Every parameter below `root` in the order of declaration, a tied one once
// (under its first name). One of a module that is no Block is described as it
// is: replicated, of its own shape.
std::vector<Parameter> parameters_of(torch::nn::Module& root);

struct MaterialiseOptions {
  uint64_t seed = 0;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  // False leaves the memory unset, for weights that are read from files.
  bool fill = true;
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
