#include "tessera/nn/matmul.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/nn/detail/cpu_kernels.h"
#include "tessera/nn/kernel_choice.h"

// Exported by LibTorch, in no header of its wheel: result = beta * result +
// alpha * mat1 mat2.
namespace at::native {
void mkldnn_matmul(const at::Tensor& mat1, const at::Tensor& mat2,
                   const at::Tensor& result, float beta, float alpha);
}  // namespace at::native

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Below it what oneDNN does around a product takes longer than the product.
constexpr int64_t kFewMultiplications = int64_t{1} << 18;

bool takes_onednn(const at::Tensor& y, const at::Tensor& a) {
  return y.is_cpu() && y.scalar_type() == at::kFloat &&
         y.numel() * a.size(1) >= kFewMultiplications &&
         at::globalContext().userEnabledMkldnn() && at::hasMKLDNN() &&
         uses(Kernel::kOneDnnProduct);
}

at::Tensor rows_of(const at::Tensor& x) {
  const auto leading = x.sizes().slice(0, x.dim() - 1);
  return x.reshape({c10::multiply_integers(leading), x.size(-1)});
}

std::vector<int64_t> with_features(const at::Tensor& x, int64_t features) {
  auto shape = x.sizes().vec();
  shape.back() = features;
  return shape;
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  if (at::GradMode::is_enabled()) return at::mm(a, b);  // itself recorded
  at::Tensor y = at::empty({a.size(0), b.size(1)}, a.options());
  product_into(y, a, b);
  return y;
}

bool has_listeners(torch::autograd::Node& accumulator) {
  return !accumulator.pre_hooks().empty() ||
         !accumulator.tensor_pre_hooks().empty() ||
         !accumulator.post_hooks().empty() ||
         accumulator.tensor_post_acc_grad_hooks() != nullptr;
}

// Whether the backward that is under way may add to .grad by itself.
bool adds_in_place(const at::Tensor& parameter) {
  namespace impl = torch::autograd::impl;
  const at::Tensor& gradient = parameter.grad();
  if (!uses(Kernel::kGradientInPlace) || at::GradMode::is_enabled() ||
      !parameter.is_leaf() || !parameter.is_cpu() || !gradient.defined() ||
      !gradient.is_contiguous() || gradient.requires_grad() ||
      !impl::hooks(parameter).empty()) {
    return false;
  }
  const auto accumulator = impl::try_get_grad_accumulator(parameter);
  if (!accumulator || has_listeners(*accumulator)) return false;
  const auto* const asked = torch::autograd::get_current_graph_task_exec_info();
  const auto found = asked->find(accumulator.get());
  return found == asked->end() || found->second.captures_ == nullptr;
}

// dW = dy^T x: added to .grad, or to be handed on.
at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& dy,
                           const at::Tensor& x) {
  if (!adds_in_place(weight)) return product(dy.t(), x);
  const at::Tensor& gradient = weight.grad();
  if (gradient.scalar_type() == dy.scalar_type()) {
    product_into(gradient, dy.t(), x, /*adds=*/true);
  } else {
    gradient.add_(product(dy.t(), x));
  }
  return {};
}

class LinearProduct : public torch::autograd::Function<LinearProduct> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    ctx->save_for_backward({weight.requires_grad() ? x : at::Tensor(), weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    const at::Tensor rows = rows_of(x);
    // No view: what follows may overwrite it.
    at::Tensor y = at::empty(with_features(x, weight.size(0)), x.options());
    if (bias) y.copy_(bias->expand_as(y));
    product_into(rows_of(y), rows, weight.t(), /*adds=*/bias.has_value());
    return y;
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor dy = rows_of(gradients[0]).contiguous();
    at::Tensor dx, dweight, dbias;
    if (ctx->needs_input_grad(0)) {
      dx =
          product(dy, weight).view(with_features(gradients[0], weight.size(1)));
    }
    if (ctx->needs_input_grad(1)) {
      dweight = weight_gradient(weight, dy, rows_of(x));
    }
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) {
      dbias = dy.sum(0);
    }
    return {dx, dweight, dbias};
  }
};

class EmbeddingRows : public torch::autograd::Function<EmbeddingRows> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& table,
                            const at::Tensor& ids) {
    ctx->save_for_backward({table, ids});
    return at::embedding(table, ids);
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &table = saved[0], &ids = saved[1];
    if (!adds_in_place(table)) {
      return {at::embedding_dense_backward(gradients[0], ids, table.size(0),
                                           /*padding_idx=*/-1,
                                           /*scale_grad_by_freq=*/false),
              {}};
    }
    detail::add_rows(table.grad(), ids.reshape({-1}).contiguous(),
                     rows_of(gradients[0]).contiguous());
    return {{}, {}};
  }
};

}  // namespace

void product_into(const at::Tensor& y, const at::Tensor& a, const at::Tensor& b,
                  bool adds) {
  if (takes_onednn(y, a)) {
    return at::native::mkldnn_matmul(a, b, y, adds ? 1.0F : 0.0F, 1.0F);
  }
  at::Tensor into = y;
  if (adds) {
    at::addmm_out(into, into, a, b);
  } else {
    at::mm_out(into, a, b);
  }
}

at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight,
                          const at::Tensor& bias) {
  return LinearProduct::apply(
      x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

at::Tensor table_rows(const at::Tensor& table, const at::Tensor& ids) {
  return EmbeddingRows::apply(table, ids);
}

}  // namespace tessera::nn
