#include "tessera/wrappers/detail/heard_products.h"

#include <ATen/ATen.h>

#include <string_view>

#include "tessera/nn/matmul.h"

namespace tessera::wrappers {
namespace {

// The parameter whose transpose this is; undefined: it is of none.
at::Tensor transposed_of(const at::Tensor& view) {
  if (view.dim() != 2 || view.is_contiguous()) return {};
  if (!view.requires_grad()) {
    const at::Tensor weight = view.t();
    return weight.is_contiguous() ? weight : at::Tensor();
  }
  if (!view.is_view()) return {};
  const at::Tensor base(view._base());
  const bool is_whole = base.is_leaf() && base.dim() == 2 &&
                        base.is_contiguous() && base.numel() == view.numel() &&
                        base.size(0) == view.size(1) &&
                        base.storage_offset() == view.storage_offset();
  return is_whole ? base : at::Tensor();
}

bool fits(const at::Tensor& x, const at::Tensor& weight,
          const at::Tensor& bias) {
  const auto is_like = [&](const at::Tensor& other) {
    return other.is_cpu() && other.scalar_type() == x.scalar_type();
  };
  return weight.defined() && weight.dim() == 2 && weight.is_contiguous() &&
         is_like(weight) && x.is_cpu() && x.dim() >= 2 &&
         x.size(-1) == weight.size(1) &&
         (!bias.defined() ||
          (is_like(bias) && bias.dim() == 1 && bias.size(0) == weight.size(0)));
}

bool goes_another_way(const at::Tensor& x, const at::Tensor& weight,
                      const at::Tensor& bias) {
  return fits(x, weight, bias) &&
         nn::gains_by_linear_product(x.numel() * weight.size(0),
                                     x.scalar_type());
}

}  // namespace

bool is_one(const c10::IValue& scalar) { return scalar.toScalar().equal(1); }

bool run_product(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string_view name = op.schema().name();
  const size_t count = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  const auto tensor = [&](size_t i) {
    return arguments[i].isTensor() ? arguments[i].toTensor() : at::Tensor();
  };
  at::Tensor x, weight, bias;
  if (name == "aten::linear") {
    x = tensor(0), weight = tensor(1), bias = tensor(2);
  } else if ((name == "aten::matmul" || name == "aten::mm") && count == 2) {
    x = tensor(0), weight = transposed_of(tensor(1));
  } else if (name == "aten::addmm" && count == 5 && is_one(arguments[3]) &&
             is_one(arguments[4])) {
    bias = tensor(0), x = tensor(1), weight = transposed_of(tensor(2));
  }
  if (!x.defined() || !goes_another_way(x, weight, bias)) return false;
  const at::Tensor y = nn::linear_product(x, weight, bias);
  torch::jit::drop(*stack, count);
  stack->emplace_back(y);
  return true;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const at::Tensor& bias) {
  return goes_another_way(x, weight, bias) ? nn::linear_product(x, weight, bias)
                                           : at::linear(x, weight, bias);
}

}  // namespace tessera::wrappers
