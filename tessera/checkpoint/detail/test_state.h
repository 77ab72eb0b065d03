// States for the tests of checkpoints: every element is a known function of its
// tensor and its place, cut into boxes in one of several ways.
#pragma once

#include <ATen/Functions.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/mesh/layout.h"

namespace tessera::checkpoint::detail {

struct TestTensor {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
};

inline std::vector<TestTensor> test_tensors() {
  return {{"model.embed.weight", at::kFloat, {13, 6}},
          {"model.layers.0.mlp.weight", at::kBFloat16, {8, 5, 3}},
          {"model.norm.weight", at::kFloat, {6}},
          {"model.none", at::kFloat, {0, 4}},
          {"optimizer.exp_avg.model.embed.weight", at::kDouble, {13, 6}},
          {"optimizer.step", at::kLong, {}},
          {"model.rows_of_none", at::kFloat, {4, 0}},
          {"buffer.bytes", at::kByte, {7}}};
}

// The whole tensor as it is at a step.
inline at::Tensor whole_of(const TestTensor& tensor, int64_t step) {
  int64_t numel = 1;
  for (const int64_t size : tensor.shape) numel *= size;
  const auto salt = static_cast<int64_t>(tensor.name.size());
  return (at::arange(numel, at::kLong) * 3 + salt + step * 17)
      .remainder(251)
      .to(tensor.dtype)
      .reshape(tensor.shape);
}

// How tensor `index` lies on `ranks` ranks: whole on all, or in chunks of one
// dim, owners and dims drawn from `seed`.
inline TensorEntry entry_of(const TestTensor& tensor, int64_t step,
                            uint64_t seed, int64_t rank, int64_t ranks) {
  std::mt19937_64 random(seed);
  const uint64_t cut = random() % 3;
  const auto owner = static_cast<int64_t>(random() % ranks);
  TensorEntry entry{tensor.name, tensor.shape, mesh::Box::whole(tensor.shape),
                    whole_of(tensor, step), rank == owner};
  if (cut < tensor.shape.size()) {
    const auto dim = static_cast<int64_t>(cut);
    const auto range = mesh::chunk_of(tensor.shape[dim], ranks, rank);
    entry.box.offset[dim] = range.begin;
    entry.box.size[dim] = range.size();
    entry.local = entry.local.narrow(dim, range.begin, range.size()).clone();
    entry.owned = true;
  }
  // A tensor without elements has one owner, however it is cut.
  if (whole_of(tensor, step).numel() == 0) {
    entry.box = mesh::Box::whole(tensor.shape);
    entry.local = whole_of(tensor, step);
    entry.owned = rank == owner;
  }
  return entry;
}

// Seed 0: whole on every rank, written by rank 0.
inline State test_state(int64_t step, uint64_t seed, int64_t rank,
                        int64_t ranks) {
  State state;
  state.extra = "{\"step\":" + std::to_string(step) + "}";
  for (const TestTensor& tensor : test_tensors()) {
    if (seed == 0) {
      state.tensors.push_back({tensor.name, tensor.shape,
                               mesh::Box::whole(tensor.shape),
                               whole_of(tensor, step), rank == 0});
    } else {
      const auto place = state.tensors.size() * 1000;
      state.tensors.push_back(
          entry_of(tensor, step, seed + place, rank, ranks));
    }
  }
  return state;
}

// The same boxes, all zero.
inline State empty_state(uint64_t seed, int64_t rank, int64_t ranks) {
  State state = test_state(0, seed, rank, ranks);
  state.extra.clear();
  for (TensorEntry& entry : state.tensors) {
    entry.local = at::zeros_like(entry.local);
  }
  return state;
}

// What is in the folder, sorted.
inline std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

// The name of the first tensor whose bits are not those of the step; "" where
// all are.
inline std::string first_difference(const State& state, int64_t step) {
  size_t index = 0;
  for (const TestTensor& tensor : test_tensors()) {
    const TensorEntry& entry = state.tensors.at(index++);
    at::Tensor expected = whole_of(tensor, step);
    for (size_t dim = 0; dim < entry.box.size.size(); ++dim) {
      expected = expected.narrow(static_cast<int64_t>(dim),
                                 entry.box.offset[dim], entry.box.size[dim]);
    }
    if (!at::equal(entry.local, expected)) return tensor.name;
  }
  const std::string extra = "{\"step\":" + std::to_string(step) + "}";
  return state.extra == extra ? "" : "extra";
}

}  // namespace tessera::checkpoint::detail
