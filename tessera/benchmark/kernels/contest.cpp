#include "tessera/benchmark/kernels/contest.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

namespace tessera::benchmark::kernels {

at::Tensor random_tensor(at::IntArrayRef shape, at::ScalarType dtype,
                         uint64_t seed) {
  const auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kFloat)).to(dtype);
}

at::Tensor wide(const at::Tensor& x) { return x.detach().to(at::kDouble); }

}  // namespace tessera::benchmark::kernels
