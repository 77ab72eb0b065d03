#include "tessera/benchmark/kernels/contest.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <utility>

namespace tessera::benchmark::kernels {

Contest Pair::forward(Contest contest) const {
  const auto run = [inputs = inputs](const Forward& function) {
    const at::NoGradGuard no_grad;
    return function(inputs);
  };
  contest.found = [run, ours = ours] { return Inputs{run(ours)}; };
  contest.ours = [run, ours = ours] { run(ours); };
  contest.libtorch = [run, libtorch = libtorch] { run(libtorch); };
  return contest;
}

Contest Pair::backward(Contest contest, const at::Tensor& dy) const {
  const auto run = [inputs = inputs, dy](const at::Tensor& y) {
    return torch::autograd::grad({y}, inputs, {dy}, /*retain_graph=*/true);
  };
  const at::Tensor y = ours(inputs), by_libtorch = libtorch(inputs);
  contest.found = [run, y] { return run(y); };
  contest.ours = [run, y] { run(y); };
  contest.libtorch = [run, by_libtorch] { run(by_libtorch); };
  return contest;
}

at::Tensor random_tensor(at::IntArrayRef shape, at::ScalarType dtype,
                         uint64_t seed) {
  const auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kFloat)).to(dtype);
}

at::Tensor leaf(at::IntArrayRef shape, at::ScalarType dtype, uint64_t seed) {
  return random_tensor(shape, dtype, seed).requires_grad_();
}

at::Tensor wide(const at::Tensor& x) { return x.detach().to(at::kDouble); }

}  // namespace tessera::benchmark::kernels
