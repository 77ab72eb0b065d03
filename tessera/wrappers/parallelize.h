// Tensor parallelism for any module, by a plan that is data.
//
//   const auto parallel = tessera::parallelize(*gpt, mesh, *communicator, {
//       {"blocks.*.attention.[qkv]", tessera::ParallelStyle::column()},
//       {"blocks.*.attention.out", tessera::ParallelStyle::row()},
//       {"tokens", tessera::ParallelStyle::vocabulary()},
//       {"head", tessera::ParallelStyle::column(tessera::Lies::kWhole,
//                                               tessera::Lies::kWhole)}});
//   ... DistributedDataParallel(gpt, data_group), an optimizer, a loop ...
//
// Plan:    globs of names of child modules, read as paths by fnmatch(3), dots
//          as slashes, and what each is to be. Linear: column or row;
//          Embedding: vocabulary; any module: sequence, whose parameters stay
//          whole. What no line names stays whole, and every rank along tp
//          computes it alike. On a mesh with pp each rank gives the module of
//          its stage, and a line may name what another stage has.
// Module:  is not changed but for its weights, of which each rank keeps its
//          share, and an Embedding's option padding_idx, which the plan takes
//          over: where its code multiplies by one, or looks up rows, what
//          parallel_linear.h says is computed instead. It sees the width that
//          a layout gives it: heads are counted from the tensors' sizes.
// Comm:    at construction a broadcast, over tp, of its first rank's values;
//          with pp an all_reduce of a number a line, over all ranks;
//          then parallel_linear.h's, along tp.
// Errors:  a line that names no module, or one of another kind; two lines for
//          one module; features that do not divide; an Embedding with
//          scale_grad_by_freq, max_norm or sparse; any other product with a
//          weight that is shared out; and, while gradients are recorded, any
//          other operator on it.
// Limits:  no weight that several modules share. Shares that got other memory,
//          by torch::load() or to(), are not known any more: wrappers/load.h
//          reads into what they have. Call it before
//          DistributedDataParallel or fully_shard(), which take the ranks along
//          the data axes, and before an optimizer is made.
// Source:  parallel_linear.h; plans as PyTorch's parallelize_module has them.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/wrappers/parallel_linear.h"

namespace tessera {

struct PlanLine {
  std::string modules;  // a glob
  ParallelStyle style;
};
using ParallelPlan = std::vector<PlanLine>;

// What keeps a module parallel: it lives as long as the module computes.
class Parallelized {
 public:
  Parallelized(torch::nn::Module& module, const mesh::DeviceMesh& mesh,
               comm::Communicator& ranks, const ParallelPlan& plan);
  ~Parallelized();
  Parallelized(Parallelized&&) noexcept;
  Parallelized& operator=(Parallelized&&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Every rank of the mesh calls it; without an axis tp nothing is changed.
Parallelized parallelize(torch::nn::Module& module,
                         const mesh::DeviceMesh& mesh,
                         comm::Communicator& ranks, const ParallelPlan& plan);

}  // namespace tessera
