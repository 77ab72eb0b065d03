#include "tessera/nn/fp8_product.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <optional>
#include <tuple>

#include "tessera/nn/gpu/one_pass.h"
#include "tessera/nn/gpu/program.h"

namespace tessera::nn {
namespace {

// As loops.cu has them. Below the least one 448 / x were no number of fp32.
constexpr double kLargest = 448, kLeastOfRow = 0x1p-100;

}  // namespace

bool takes_fp8(const at::Tensor& weight) {
  return weight.scalar_type() == at::kBFloat16 && weight.numel() > 0 &&
         takes_fp8(weight.size(0), weight.size(1));
}

Fp8Rows fp8_rows(const at::Tensor& x) {
  if (gpu::runs(x)) {
    const auto [values, scales] =
        gpu::fp8_rows(x.stride(1) == 1 ? x : x.contiguous());
    return {values, scales};
  }
  RECORD_FUNCTION("tessera::fp8_rows", {});
  const at::Tensor most =
      x.abs().amax(1, /*keepdim=*/true).to(at::kFloat).clamp_min_(kLeastOfRow);
  const at::Tensor scaled = x.to(at::kFloat).mul_(kLargest / most);
  return {scaled.clamp_(-kLargest, kLargest).to(at::kFloat8_e4m3fn),
          most / kLargest};
}

Fp8Rows fp8_columns(const at::Tensor& x) {
  if (!gpu::runs(x)) return fp8_rows(x.t().contiguous());
  const auto [values, scales] = gpu::fp8_columns(x.contiguous());
  return {values, scales};
}

void fp8_product_into(const at::Tensor& y, const Fp8Rows& a, const Fp8Rows& b,
                      const at::Tensor& bias, Sums sums) {
  RECORD_FUNCTION("tessera::fp8_product", {});
  at::Tensor into = y;
  if (y.is_cuda()) {
    at::_scaled_mm_out(into, a.values, b.values.t(), a.scales, b.scales.t(),
                       bias.defined() ? std::optional(bias) : std::nullopt,
                       /*scale_result=*/std::nullopt, y.scalar_type(),
                       /*use_fast_accum=*/sums == Sums::kFast);
    return;
  }
  at::Tensor wide =
      at::mm(a.values.to(at::kFloat), b.values.to(at::kFloat).t());
  wide.mul_(a.scales).mul_(b.scales.t());
  if (bias.defined()) wide.add_(bias);
  into.copy_(wide);
}

}  // namespace tessera::nn
