#include "tessera/nn/matmul.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <optional>

#include "tessera/core/error.h"
#include "tessera/core/processor.h"
#include "tessera/core/vectors.h"
#include "tessera/nn/detail/kernel_table.h"
#include "tessera/nn/detail/one_pass.h"
#include "tessera/nn/detail/remade.h"
#include "tessera/nn/detail/wide_product.h"
#include "tessera/nn/gpu/one_pass.h"
#include "tessera/nn/gpu/program.h"
#include "tessera/nn/kernel_choice.h"
#include "tessera/nn/unwritten_gradients.h"
#include "tessera/nn/weight_queue.h"
#include "tessera/nn/wide_type.h"

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

at::Tensor rows_of(const at::Tensor& x) {
  const auto leading = x.sizes().slice(0, x.dim() - 1);
  return x.reshape({c10::multiply_integers(leading), x.size(-1)});
}

std::vector<int64_t> with_features(const at::Tensor& x, int64_t features) {
  auto shape = x.sizes().vec();
  shape.back() = features;
  return shape;
}

// As products read it: on a GPU also columns of a wider matrix, where they lie.
at::Tensor matrix_of(const at::Tensor& x) {
  const at::Tensor rows = rows_of(x);
  return rows.is_cuda() && rows.stride(1) == 1 ? rows : rows.contiguous();
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  if (at::GradMode::is_enabled()) return at::mm(a, b);  // itself recorded
  at::Tensor y = at::empty({a.size(0), b.size(1)}, a.options());
  product_into(y, a, b);
  return y;
}

// Products of our own go by sizes unasked.
void check_factors(const at::Tensor& y, const at::Tensor& a,
                   const at::Tensor& b) {
  TS_CHECK(y.dim() == 2 && a.dim() == 2 && b.dim() == 2 &&
               a.size(1) == b.size(0) && y.size(0) == a.size(0) &&
               y.size(1) == b.size(1),
           "a product of ", a.sizes(), " and ", b.sizes(), " into ", y.sizes(),
           ": they do not fit.");
}

// Sums are of fp32: fp64 has no place among them.
void check_widened(const at::Tensor& y, const at::Tensor& a,
                   const at::Tensor& b) {
  const at::ScalarType type = a.scalar_type();
  const bool is_narrow_enough =
      type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  TS_CHECK(is_narrow_enough && b.scalar_type() == type &&
               (y.scalar_type() == type || y.scalar_type() == at::kFloat),
           "a product of ", type, " and ", b.scalar_type(), " into ",
           y.scalar_type(), " is not to be had through fp32.");
}

// y = a b + bias: on a GPU cuBLAS adds it where the product ends.
void product_onto_bias(at::Tensor y, const at::Tensor& bias,
                       const at::Tensor& a, const at::Tensor& b) {
  if (y.is_cuda()) {
    at::addmm_out(y, bias, a, b);
    return;
  }
  y.copy_(bias.expand_as(y));
  product_into(y, a, b, /*adds=*/true);
}

// Products read and write by pointers. Who listens to memory is told by
// operators (wrappers/detail/heard_memory.h): here by one that does nothing.
void announce(const at::Tensor& tensor) {
  if (tensor.key_set().has(c10::DispatchKey::DeferredInit)) tensor.detach();
}

bool has_listeners(torch::autograd::Node& accumulator) {
  const bool is_heard = std::ranges::any_of(
      accumulator.pre_hooks(),
      [](const auto& hook) { return !is_of_unwritten(*hook); });
  return is_heard || !accumulator.tensor_pre_hooks().empty() ||
         !accumulator.post_hooks().empty() ||
         accumulator.tensor_post_acc_grad_hooks() != nullptr;
}

// Whether .grad is there, as a product can add to it.
bool has_place(const at::Tensor& parameter) {
  return uses(Kernel::kGradientInPlace) && parameter.grad().defined() &&
         parameter.grad().is_contiguous();
}

// REQUIRES: .grad may be added to where it lies.
void add_or_wait(const at::Tensor& weight, const at::Tensor& dy,
                 const at::Tensor& x) {
  if (const auto rows = rows_to_multiply(weight, dy, x)) {
    gradient_into(weight.grad(), rows->dy, rows->x,
                  /*adds=*/!take_unwritten(weight));
  }
}

// dW = dy^T x: added to .grad, or to be handed on.
at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& dy,
                           const at::Tensor& x) {
  if (!adds_in_place(weight)) return product(dy.t(), x);
  announce(weight.grad());
  add_or_wait(weight, dy, x);
  return {};
}

// Of weights of one x on a GPU, whose gradients lie one behind the other, and
// those of their products side by side, as a gated activation writes them
// (gpu/one_pass.h): all of dW = dy^T x at once, of which cuBLAS shares out the
// work better. False where it is not so, and nothing is done.
bool add_joined(const variable_list& weights, const variable_list& dys,
                const at::Tensor& x) {
  const at::Tensor &first = weights.front(), &dy = dys.front();
  if (weights.size() < 2 || !dy.is_cuda()) return false;
  const auto end_of = [](const at::Tensor& columns) {
    return static_cast<const char*>(columns.const_data_ptr()) +
           columns.size(1) * static_cast<int64_t>(columns.itemsize());
  };
  int64_t out = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!adds_in_place(weights[i])) return false;
    const at::Tensor& gradient = weights[i].grad();
    out += gradient.size(0);
    if (i == 0) continue;
    const at::Tensor& before = weights[i - 1].grad();
    const bool are_joined =
        gradient.const_data_ptr() ==
            static_cast<const char*>(before.const_data_ptr()) +
                before.nbytes() &&
        gradient.storage().is_alias_of(before.storage()) &&
        dys[i].const_data_ptr() == end_of(dys[i - 1]) &&
        dys[i].storage().is_alias_of(dy.storage());
    if (!are_joined || dys[i].stride(0) != dy.stride(0)) return false;
  }
  variable_list fresh;
  std::ranges::copy_if(weights, std::back_inserter(fresh), take_unwritten);
  const bool adds = fresh.size() < weights.size();
  for (size_t i = 0; adds && i < fresh.size(); ++i) fresh[i].grad().zero_();
  const int64_t in = first.size(1);
  gradient_into(first.grad().as_strided({out, in}, {in, 1}),
                dy.as_strided({dy.size(0), out}, {dy.stride(0), 1}), x, adds);
  return true;
}

// As many products as weights; as many biases, or none.
class LinearProducts : public torch::autograd::Function<LinearProducts> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x,
                               at::TensorList weights, at::TensorList biases,
                               ProductType type) {
    const bool trains = std::ranges::any_of(
        weights, [](const at::Tensor& w) { return w.requires_grad(); });
    variable_list saved;
    detail::keep_input(ctx, saved, trains ? x : at::Tensor());
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["has_bias"] = !biases.empty();
    ctx->saved_data["is_fp8"] = type == ProductType::kFp8;
    if (trains) WeightQueue::remember(ctx);
    ctx->set_materialize_grads(false);  // of an output that nobody uses
    const at::Tensor rows = rows_of(x);
    std::optional<Fp8Rows> rounded;
    variable_list outputs;
    for (size_t i = 0; i < weights.size(); ++i) {
      // No view: what follows may overwrite it.
      const at::Tensor y =
          at::empty(with_features(x, weights[i].size(0)), x.options());
      const at::Tensor into = rows_of(y);
      if (type == ProductType::kFp8 && takes_fp8(weights[i])) {
        announce(weights[i]);
        if (!rounded) rounded = fp8_rows(rows);
        fp8_product_into(into, *rounded, fp8_rows(weights[i]),
                         biases.empty() ? at::Tensor() : biases[i],
                         Sums::kFast);
      } else if (biases.empty()) {
        product_into(into, rows, weights[i].t());
      } else {
        product_onto_bias(into, biases[i], rows, weights[i].t());
      }
      outputs.push_back(y);
    }
    return outputs;
  }

  // The parts of dx are summed where they lie.
  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const size_t count = gradients.size();
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    const bool is_fp8 = ctx->saved_data["is_fp8"].toBool();
    const auto queue = WeightQueue::open_for(ctx);
    // x, weights, biases, the type
    variable_list to(2 + (has_bias ? 2 : 1) * count);
    at::Tensor x;
    variable_list wanted, dys;  // weights of which gradients are, and of what
    std::vector<size_t> places;
    for (size_t i = 0; i < count; ++i) {
      if (!gradients[i].defined()) continue;
      const at::Tensor& weight = saved[1 + i];
      const at::Tensor dy = matrix_of(gradients[i]);
      if (ctx->needs_input_grad(0)) {
        announce(weight);
        if (is_fp8 && takes_fp8(weight) && !at::GradMode::is_enabled()) {
          add_fp8_product(to[0], dy, weight);
        } else {
          add_product(to[0], dy, weight);
        }
      }
      if (ctx->needs_input_grad(1 + i)) {
        if (!x.defined()) x = rows_of(detail::input_of(ctx, saved));
        if (queue) {
          // Without what made it, which holds the queue.
          queue->add([weight, dy, x = x.detach()] {
            add_weight_gradient(weight, dy, x);
          });
        } else {
          wanted.push_back(weight);
          dys.push_back(dy);
          places.push_back(1 + i);
        }
      }
      const size_t bias = 1 + count + i;
      if (has_bias && ctx->needs_input_grad(bias)) {
        const bool by_loop = gpu::runs(dy) && !at::GradMode::is_enabled();
        to[bias] = by_loop ? gpu::column_sums(dy.contiguous()) : dy.sum(0);
      }
    }
    if (!wanted.empty() && !add_joined(wanted, dys, x)) {
      for (size_t i = 0; i < wanted.size(); ++i) {
        to[places[i]] = weight_gradient(wanted[i], dys[i], x);
      }
    }
    if (to[0].defined()) {
      const auto& like = *std::ranges::find_if(
          gradients, [](const at::Tensor& g) { return g.defined(); });
      to[0] = to[0].view(with_features(like, to[0].size(1)));
    }
    return to;
  }

 private:
  static void add_product(at::Tensor& sum, const at::Tensor& a,
                          const at::Tensor& b) {
    if (!sum.defined()) {
      sum = product(a, b);
    } else if (at::GradMode::is_enabled()) {
      sum = sum + at::mm(a, b);
    } else {
      product_into(sum, a, b, /*adds=*/true);
    }
  }

  static void add_fp8_product(at::Tensor& sum, const at::Tensor& a,
                              const at::Tensor& b) {
    const at::Tensor y = at::empty({a.size(0), b.size(1)}, a.options());
    fp8_product_into(y, fp8_rows(a), fp8_columns(b), /*bias=*/{}, Sums::kExact);
    if (sum.defined()) {
      sum.add_(y);
    } else {
      sum = y;
    }
  }
};

class EmbeddingRows : public torch::autograd::Function<EmbeddingRows> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& table,
                            const at::Tensor& ids) {
    ctx->save_for_backward({table, ids});
    if (table.requires_grad()) WeightQueue::remember(ctx);
    return at::embedding(table, ids);
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &table = saved[0], &ids = saved[1];
    const auto queue = WeightQueue::open_for(ctx);
    if (queue && table.is_cpu() && has_place(table)) {
      queue->add([table, ids, dy = gradients[0]] { add(table, ids, dy); });
      return {{}, {}};
    }
    if (!table.is_cpu() || !adds_in_place(table)) {
      return {at::embedding_dense_backward(gradients[0], ids, table.size(0),
                                           /*padding_idx=*/-1,
                                           /*scale_grad_by_freq=*/false),
              {}};
    }
    announce(table.grad());
    add(table, ids, gradients[0]);
    return {{}, {}};
  }

 private:
  static void add(const at::Tensor& table, const at::Tensor& ids,
                  const at::Tensor& dy) {
    fill_unwritten(table);
    detail::add_rows(table.grad(), ids.reshape({-1}).contiguous(),
                     rows_of(dy).contiguous());
  }
};

}  // namespace

bool adds_in_place(const at::Tensor& parameter) {
  namespace impl = torch::autograd::impl;
  if (!parameter.is_leaf()) return false;  // LibTorch warns of its .grad
  if (!has_place(parameter) || at::GradMode::is_enabled() ||
      parameter.grad().requires_grad() || !impl::hooks(parameter).empty()) {
    return false;
  }
  const auto accumulator = impl::try_get_grad_accumulator(parameter);
  if (!accumulator || has_listeners(*accumulator)) return false;
  // Empty: all of the graph is executed, and nothing is captured.
  const auto* const asked = torch::autograd::get_current_graph_task_exec_info();
  if (asked == nullptr || asked->empty()) return true;
  const auto found = asked->find(accumulator.get());
  return found != asked->end() && found->second.should_execute() &&
         found->second.captures_ == nullptr;
}

void gradient_into(const at::Tensor& gradient, const at::Tensor& dy,
                   const at::Tensor& x, bool adds, Sizes sizes) {
  if (gradient.scalar_type() == dy.scalar_type() ||
      (gradient.scalar_type() == at::kFloat &&
       product_way(gradient, dy.t()) == ProductWay::kWidened)) {
    product_into(gradient, dy.t(), x, adds, sizes);
  } else if (dy.is_cuda() && gradient.scalar_type() == at::kFloat) {
    // cuBLAS sums in fp32 where bf16 and fp16 are multiplied.
    at::Tensor into = gradient;
    at::addmm_out(into, into, dy.t(), x, at::kFloat, /*beta=*/adds ? 1 : 0);
  } else if (!adds) {
    gradient.copy_(product(dy.t(), x));
  } else if (gradient.scalar_type() == wide_type(dy) && dy.is_cpu() &&
             c10::isReducedFloatingType(dy.scalar_type())) {
    detail::add_to_wide(gradient, product(dy.t(), x));
  } else {
    gradient.add_(product(dy.t(), x));
  }
}

bool has_one_dnn_products() {
  static const bool has = [] {
    const auto asked = c10::Dispatcher::singleton().findSchema(
        {"mkldnn::_is_mkldnn_bf16_supported", ""});
    return at::hasMKLDNN() && asked && asked->typed<bool()>().call();
  }();
  return has;
}

ProductWay product_way(int64_t multiplications, at::ScalarType type) {
  if (multiplications < kFewMultiplications ||
      !at::globalContext().userEnabledMkldnn()) {
    return ProductWay::kLibTorch;
  }
  // MKL is behind at::mm, and has its best code for processors of its maker.
  const bool mkl_is_faster = at::hasMKL() && is_intel();
  if (type == at::kFloat && !mkl_is_faster && uses(Kernel::kOneDnnProduct) &&
      has_one_dnn_products()) {
    return ProductWay::kOneDnn;
  }
  return widens(type) ? ProductWay::kWidened : ProductWay::kLibTorch;
}

bool gains_by_linear_product(int64_t multiplications, at::ScalarType type) {
  const bool adds_large = type == at::kFloat &&
                          multiplications >= kFewMultiplications &&
                          uses(Kernel::kGradientInPlace);
  return adds_large ||
         product_way(multiplications, type) != ProductWay::kLibTorch;
}

bool widens(at::ScalarType type) {
  const bool has_no_arithmetic =
      type == at::kHalf || (type == at::kBFloat16 && !gains_by_bf16());
  return has_no_arithmetic && at::globalContext().userEnabledMkldnn() &&
         uses(Kernel::kWidenedProduct);
}

int64_t widened_numbers(at::ScalarType type, int64_t rows, int64_t in,
                        int64_t out, bool into_wide, int64_t threads) {
  if (!widens(type) || rows * in * out < kFewMultiplications) return 0;
  return detail::wide_product_numbers(rows, in, out, into_wide, threads);
}

ProductWay product_way(const at::Tensor& y, const at::Tensor& a) {
  if (!y.is_cpu()) return ProductWay::kLibTorch;
  return product_way(y.numel() * a.size(1), a.scalar_type());
}

void product_into(const at::Tensor& y, const at::Tensor& a, const at::Tensor& b,
                  bool adds, Sizes sizes) {
  const ProductWay way = product_way(y, a);
  const bool is_new = sizes == Sizes::kNew && way == ProductWay::kOneDnn;
  product_into(y, a, b, adds, is_new ? ProductWay::kLibTorch : way);
}

void product_into(const at::Tensor& y, const at::Tensor& a, const at::Tensor& b,
                  bool adds, ProductWay way) {
  check_factors(y, a, b);
  switch (way) {
    case ProductWay::kOneDnn: {
      RECORD_FUNCTION("tessera::product", {});
      return at::native::mkldnn_matmul(a, b, y, adds ? 1.0F : 0.0F, 1.0F);
    }
    case ProductWay::kWidened: {
      check_widened(y, a, b);
      RECORD_FUNCTION("tessera::product", {});
      return detail::wide_product(detail::table(), y, a, b, adds);
    }
    case ProductWay::kLibTorch: {
      at::Tensor into = y;
      if (adds) {
        at::addmm_out(into, into, a, b);
      } else {
        at::mm_out(into, a, b);
      }
    }
  }
}

at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight,
                          const at::Tensor& bias, ProductType type) {
  return linear_products(x, {weight},
                         bias.defined() ? variable_list{bias} : variable_list(),
                         type)
      .front();
}

variable_list linear_products(const at::Tensor& x, const variable_list& weights,
                              const variable_list& biases, ProductType type) {
  return LinearProducts::apply(x, at::TensorList(weights),
                               at::TensorList(biases), type);
}

void add_weight_gradient(const at::Tensor& weight, const at::Tensor& dy,
                         const at::Tensor& x) {
  if (!weight.grad().defined()) {
    weight.mutable_grad() = product(dy.t(), x);
  } else if (has_place(weight)) {
    add_or_wait(weight, dy, x);
  } else {
    fill_unwritten(weight);
    weight.grad().add_(product(dy.t(), x));
  }
}

at::Tensor table_rows(const at::Tensor& table, const at::Tensor& ids) {
  return EmbeddingRows::apply(table, ids);
}

}  // namespace tessera::nn
