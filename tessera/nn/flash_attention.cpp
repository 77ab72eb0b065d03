#include "tessera/nn/flash_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "tessera/core/error.h"
#include "tessera/core/parallel.h"
#include "tessera/nn/detail/flash.h"
#include "tessera/nn/detail/kernel_table.h"
#include "tessera/nn/detail/mask.h"
#include "tessera/nn/detail/second_derivatives.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn {
namespace {

using detail::elements_from;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kQueries = kernels::kAttentionQueries;

// What loops go by unasked: (B, T, H, E), and twice (B, S, K, E).
bool have_fitting_heads(const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v) {
  const auto is_alike = [&](const at::Tensor& x) {
    return x.dim() == 4 && x.scalar_type() == q.scalar_type() && x.is_cpu() &&
           x.stride(3) == 1;
  };
  return is_alike(q) && is_alike(k) && is_alike(v) && v.sizes() == k.sizes() &&
         k.size(0) == q.size(0) && k.size(3) == q.size(3) && k.size(2) > 0 &&
         q.size(2) % k.size(2) == 0;
}

FlashShape shape_of(const at::Tensor& q, const at::Tensor& k,
                    const at::Tensor& v, const FlashRuns& runs) {
  TS_CHECK(have_fitting_heads(q, k, v),
           "flash_attention: there are no loops for q ", q.sizes(), ", k ",
           k.sizes(), " and v ", v.sizes(), " of ", q.scalar_type(), ", ",
           k.scalar_type(), " and ", v.scalar_type(), ".");
  return {q.size(0), q.size(1), q.size(2),
          k.size(2), q.size(3), static_cast<bool>(runs.dropout)};
}
int64_t groups_of_queries(const FlashShape& shape) {
  return (shape.tokens + kQueries - 1) / kQueries;
}

// From head `head` of sample b of (B, T, H, E).
kernels::Rows rows_of(const at::Tensor& x, int64_t b, int64_t head) {
  return {elements_from(x, b * x.stride(0) + head * x.stride(2)), x.stride(1),
          x.stride(2)};
}

double scale_of(const FlashShape& shape) {
  return 1 / std::sqrt(static_cast<double>(shape.width));
}

// Tasks that threads share, and the numbers that a thread needs for them.
struct Work {
  int64_t tasks, scratch;
  int64_t threads(int64_t most) const { return std::min(most, tasks); }
};

Work forward_work(const FlashShape& shape) {
  return {shape.samples * shape.heads * groups_of_queries(shape),
          kernels::attend_scratch(shape.width, shape.drops)};
}
Work backward_work(const FlashShape& shape) {
  return {shape.samples * shape.kv_heads,
          kernels::attend_backward_scratch(shape.heads / shape.kv_heads,
                                           shape.tokens, shape.width)};
}

// task(number, scratch), for each.
template <typename Task>
void share_out(const Work& work, const at::TensorOptions& wide,
               const Task& task) {
  const at::Tensor scratch =
      at::empty({work.threads(at::get_num_threads()), work.scratch}, wide);
  parallel_for(0, work.tasks, 1, [&](int64_t begin, int64_t end) {
    void* const own =
        elements_from(scratch, at::get_thread_num() * work.scratch);
    for (int64_t i = begin; i < end; ++i) task(i, own);
  });
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> detail::flash_forward(
    const kernels::Kernels& by, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const FlashRuns& runs) {
  const FlashShape shape = shape_of(q, k, v, runs);
  at::Tensor out = at::empty(q.sizes(), q.options());
  at::Tensor lse = at::empty({shape.samples, shape.heads, shape.tokens},
                             q.options().dtype(wide_type(q)));
  const int64_t groups = groups_of_queries(shape);
  const int64_t queries_of_one = shape.heads / shape.kv_heads;
  share_out(forward_work(shape), lse.options(), [&](int64_t i, void* scratch) {
    const int64_t b = i / groups / shape.heads;
    const int64_t head = i / groups % shape.heads;
    const int64_t kv_head = head / queries_of_one;
    // Early and late ones, which see few and many keys, by turns: threads are
    // given runs of tasks.
    const int64_t turn = i % groups / 2;
    const int64_t group = i % groups % 2 ? groups - 1 - turn : turn;
    const kernels::AttentionHead one = {
        .q = rows_of(q, b, head),
        .k = rows_of(k, b, kv_head),
        .v = rows_of(v, b, kv_head),
        .out = rows_of(out, b, head),
        .lse = elements_from(lse, (b * shape.heads + head) * shape.tokens),
        .tokens = shape.tokens,
        .keys = k.size(1),
        .width = shape.width,
        .scale = scale_of(shape),
        .is_causal = runs.is_causal,
        .mask = mask_of(runs.dropout, b, head),
        .first_query = runs.first_query,
        .first_key = runs.first_key,
        .window = runs.window};
    by.attend(element_of(q), one, group * kQueries, scratch);
  });
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> detail::flash_backward(
    const kernels::Kernels& by, const at::Tensor& gradient, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
    const at::Tensor& lse, const FlashRuns& runs) {
  const FlashShape shape = shape_of(q, k, v, runs);
  TS_CHECK(gradient.sizes() == q.sizes() && out.sizes() == q.sizes(),
           "flash_attention: a gradient ", gradient.sizes(), " and an output ",
           out.sizes(), " of q ", q.sizes(), ".");
  at::Tensor dq = at::empty(q.sizes(), q.options());
  at::Tensor dk = at::empty(k.sizes(), k.options());
  at::Tensor dv = at::empty(v.sizes(), v.options());
  const int64_t queries_of_one = shape.heads / shape.kv_heads;
  share_out(backward_work(shape), lse.options(), [&](int64_t i, void* scratch) {
    const int64_t b = i / shape.kv_heads, kv_head = i % shape.kv_heads;
    const int64_t head = kv_head * queries_of_one;
    const kernels::AttentionGroup group = {
        .gradient = rows_of(gradient, b, head),
        .q = rows_of(q, b, head),
        .k = rows_of(k, b, kv_head),
        .v = rows_of(v, b, kv_head),
        .out = rows_of(out, b, head),
        .lse = elements_from(lse, b * lse.stride(0) + head * lse.stride(1)),
        .lse_stride = lse.stride(1),
        .dq = rows_of(dq, b, head),
        .dk = rows_of(dk, b, kv_head),
        .dv = rows_of(dv, b, kv_head),
        .heads = queries_of_one,
        .tokens = shape.tokens,
        .keys = k.size(1),
        .width = shape.width,
        .scale = scale_of(shape),
        .is_causal = runs.is_causal,
        .mask = mask_of(runs.dropout, b, head),
        .first_query = runs.first_query,
        .first_key = runs.first_key,
        .window = runs.window};
    by.attend_backward(element_of(q), group, scratch);
  });
  return {dq, dk, dv};
}

namespace {

// FlashRuns for an operator: its dropout as autograd keeps it, and the rest.
struct Written {
  explicit Written(const FlashRuns& runs)
      : dropout(as_saved(runs.dropout).toIntVector()),
        rest({runs.is_causal ? 1 : 0, runs.first_query, runs.first_key,
              runs.window}) {}
  std::vector<int64_t> dropout, rest;
};
FlashRuns as_runs(at::IntArrayRef dropout, at::IntArrayRef rest) {
  return {rest[0] == 1, saved_dropout(dropout.vec()), rest[1], rest[2],
          rest[3]};
}

// Operators, so that profilers and what counts operations see them.
std::tuple<at::Tensor, at::Tensor> forward_here(const at::Tensor& q,
                                                const at::Tensor& k,
                                                const at::Tensor& v,
                                                at::IntArrayRef dropout,
                                                at::IntArrayRef rest) {
  return detail::flash_forward(detail::table(), q, k, v,
                               as_runs(dropout, rest));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_here(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
    at::IntArrayRef dropout, at::IntArrayRef rest) {
  return detail::flash_backward(detail::table(), gradient, q, k, v, out, lse,
                                as_runs(dropout, rest));
}

constexpr const char* kForward = "tessera::flash_attention";
constexpr const char* kBackward = "tessera::flash_attention_backward";

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def(
      "flash_attention(Tensor q, Tensor k, Tensor v, int[] dropout, int[] runs)"
      " -> (Tensor, Tensor)");
  library.def(
      "flash_attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, "
      "Tensor out, Tensor lse, int[] dropout, int[] runs) -> (Tensor, Tensor, "
      "Tensor)");
}
TORCH_LIBRARY_IMPL(tessera, CPU, library) {
  library.impl(kForward, &forward_here);
  library.impl(kBackward, &backward_here);
}
// FlashAttention is what autograd knows of them.
TORCH_LIBRARY_IMPL(tessera, Autograd, library) {
  library.impl(kForward, torch::CppFunction::makeFallthrough());
  library.impl(kBackward, torch::CppFunction::makeFallthrough());
}

template <typename Function>
auto operator_of(const char* name, Function* /*its type*/) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .template typed<Function>();
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> flash_forward(const at::Tensor& q,
                                                 const at::Tensor& k,
                                                 const at::Tensor& v,
                                                 const FlashRuns& runs) {
  static const auto attend = operator_of(kForward, &forward_here);
  const Written written(runs);
  return attend.call(q, k, v, written.dropout, written.rest);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
    const FlashRuns& runs) {
  static const auto attend = operator_of(kBackward, &backward_here);
  const Written written(runs);
  return attend.call(gradient, q, k, v, out, lse, written.dropout,
                     written.rest);
}

namespace {

class FlashAttention : public torch::autograd::Function<FlashAttention> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v,
                            const Dropout& dropout, int64_t window) {
    const auto [out, lse] =
        flash_forward(q, k, v, {.dropout = dropout, .window = window});
    ctx->save_for_backward({q, k, v, out, lse});
    ctx->saved_data["dropout"] = as_saved(dropout);
    ctx->saved_data["window"] = window;
    return out;
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    detail::refuse_second_derivatives("Attention");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor gradient =
        gradients[0].stride(3) == 1 ? gradients[0] : gradients[0].contiguous();
    const auto [dq, dk, dv] = flash_backward(
        gradient, saved[0], saved[1], saved[2], saved[3], saved[4],
        {.dropout = saved_dropout(ctx->saved_data["dropout"]),
         .window = ctx->saved_data["window"].toInt()});
    return {dq, dk, dv, {}, {}};
  }
};

}  // namespace

bool takes_flash(const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& v) {
  const at::ScalarType type = q.scalar_type();
  return (type == at::kDouble || type == at::kFloat || type == at::kBFloat16 ||
          type == at::kHalf) &&
         have_fitting_heads(q, k, v) && q.size(1) == k.size(1);
}

at::Tensor seen_keys(int64_t tokens, int64_t window,
                     const at::TensorOptions& options) {
  const at::Tensor past =
      at::ones({tokens, tokens}, options.dtype(at::kBool)).tril_();
  return window > 0 ? past.triu_(1 - window) : past;
}

at::Tensor flash_attention(const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const Dropout& dropout,
                           int64_t window) {
  TS_CHECK(q.size(1) == k.size(1), "flash_attention: ", q.size(1),
           " queries over ", k.size(1), " keys.");
  return FlashAttention::apply(q, k, v, dropout, window);
}

int64_t flash_scratch(const FlashShape& shape, int64_t threads) {
  const Work work = forward_work(shape);
  return work.threads(threads) * work.scratch;
}

int64_t flash_backward_scratch(const FlashShape& shape, int64_t threads) {
  const Work work = backward_work(shape);
  return work.threads(threads) * work.scratch;
}

}  // namespace tessera::nn
