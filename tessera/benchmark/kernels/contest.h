// A kernel of ours beside what operators of LibTorch make of the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera::benchmark::kernels {

// In fp64: what is right, and the sum of the absolute values that each element
// is a sum of, by which its error is judged: terms may cancel.
struct Reference {
  at::Tensor exact, magnitude;
};

struct Contest {
  std::string kernel;
  at::ScalarType dtype = at::kFloat;
  std::string shape;
  double bytes = 0;  // that are read and written at least; or
  double flops = 0;
  // What our kernel gives, once, and what that should be.
  std::function<std::vector<at::Tensor>()> found;
  std::function<std::vector<Reference>()> wanted;
  double most_ulps = 0;  // between these
  // What is timed.
  std::function<void()> ours, libtorch;
};

using MakeContest = std::function<Contest(at::ScalarType)>;

// A function of some inputs, by our kernel and by operators, whose backward can
// be gone again and again: a contest of one or the other.
struct Pair {
  using Inputs = std::vector<at::Tensor>;
  using Forward = std::function<at::Tensor(const Inputs& inputs)>;

  Inputs inputs;
  Forward ours, libtorch;

  Contest forward(Contest contest) const;
  Contest backward(Contest contest, const at::Tensor& dy) const;
};

// By file: pointwise.cpp, attention.cpp, products.cpp, loss.cpp, update.cpp,
// experts.cpp.
std::vector<MakeContest> pointwise_contests();
std::vector<MakeContest> attention_contests();
std::vector<MakeContest> product_contests();
std::vector<MakeContest> loss_contests();
std::vector<MakeContest> update_contests();
std::vector<MakeContest> expert_contests();

// Random numbers of a normal distribution, the same ones every time.
at::Tensor random_tensor(at::IntArrayRef shape, at::ScalarType dtype,
                         uint64_t seed);
// The same, as an input of a Pair.
at::Tensor leaf(at::IntArrayRef shape, at::ScalarType dtype, uint64_t seed);

// Of fp64, and no part of a graph.
at::Tensor wide(const at::Tensor& x);

}  // namespace tessera::benchmark::kernels
