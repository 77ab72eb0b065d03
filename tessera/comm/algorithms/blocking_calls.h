// A c10d::Backend's collectives, called and awaited; tensors as elements.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <vector>

#include "tessera/comm/algorithms/elements.h"

namespace tessera::comm::algorithms {

void call_all_reduce(c10d::Backend& backend, const at::Tensor& tensor,
                     ReduceOp op);
void call_all_gather(c10d::Backend& backend, const at::Tensor& output,
                     const at::Tensor& input);
void call_reduce_scatter(c10d::Backend& backend, const at::Tensor& output,
                         const at::Tensor& input, ReduceOp op);
// Splits: bytes for each rank.
void call_all_to_all(c10d::Backend& backend, const at::Tensor& output,
                     const at::Tensor& input,
                     std::vector<int64_t> output_splits,
                     std::vector<int64_t> input_splits);
void call_broadcast(c10d::Backend& backend, const at::Tensor& tensor,
                    int64_t root);
void call_barrier(c10d::Backend& backend);

// REQUIRES: contiguous, on the CPU.
Elements elements_of(const at::Tensor& tensor);

}  // namespace tessera::comm::algorithms
