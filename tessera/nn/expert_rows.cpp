#include "tessera/nn/expert_rows.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "tessera/nn/detail/one_pass.h"
#include "tessera/nn/kernel_choice.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool takes_kernel(const at::Tensor& x) {
  return detail::has_loops(x) && uses(Kernel::kExpertRows);
}

// Of each choice (N, k) its row, zeros where it has none: (N k, D).
at::Tensor rows_by_choice(const at::Tensor& rows, const at::Tensor& row) {
  const at::Tensor padded = at::constant_pad_nd(rows, {0, 0, 0, 1});
  return padded.index_select(0, row.flatten().clamp_max(rows.size(0)));
}

// What the loops compute, where it is recorded (create_graph).
at::Tensor recorded_sum(const at::Tensor& rows, const at::Tensor& row) {
  return rows_by_choice(rows, row)
      .view({row.size(0), row.size(1), rows.size(1)})
      .sum(1);
}

std::tuple<at::Tensor, at::Tensor> recorded_gradients(
    const at::Tensor& gradient, const at::Tensor& rows, const at::Tensor& row,
    const at::Tensor& weights) {
  const std::vector<int64_t> by_choice = {row.size(0), row.size(1),
                                          rows.size(1)};
  const at::Tensor of_token = gradient.to(weights.scalar_type()).unsqueeze(1);
  const at::Tensor d_weights =
      (rows_by_choice(rows, row).view(by_choice) * of_token).sum(-1);
  const at::Tensor d_choices = (of_token * weights.unsqueeze(-1)).flatten(0, 1);
  const at::Tensor d_rows =
      at::zeros({rows.size(0) + 1, rows.size(1)}, d_choices.options())
          .index_add(0, row.flatten().clamp_max(rows.size(0)), d_choices)
          .narrow(0, 0, rows.size(0));
  return {d_rows.to(rows.scalar_type()), d_weights};
}

class RowsOfTokens : public torch::autograd::Function<RowsOfTokens> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& token, const at::Tensor& row) {
    ctx->save_for_backward({row});
    return x.index_select(0, token);
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    const at::Tensor row = ctx->get_saved_variables()[0];
    const at::Tensor gradient = gradients[0].contiguous();
    return {at::GradMode::is_enabled() ? recorded_sum(gradient, row)
                                       : detail::add_up_rows(gradient, row, {}),
            {},
            {}};
  }
};

class TokensOfRows : public torch::autograd::Function<TokensOfRows> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows,
                            const at::Tensor& weights, const at::Tensor& row) {
    ctx->save_for_backward({rows, weights, row});
    return detail::add_up_rows(rows, row, weights);
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor gradient = gradients[0].contiguous();
    auto [d_rows, d_weights] =
        at::GradMode::is_enabled()
            ? recorded_gradients(gradient, saved[0], saved[2], saved[1])
            : detail::add_up_rows_backward(gradient, saved[0], saved[2],
                                           saved[1]);
    return {d_rows, d_weights, {}};
  }
};

}  // namespace

at::Tensor counts_of(const at::Tensor& numbers, int64_t kinds) {
  const at::Tensor flat = numbers.flatten();
  return at::zeros({kinds}, flat.options())
      .scatter_add_(0, flat, at::ones_like(flat));
}

RowOrder order_of_rows(const at::Tensor& experts_of, int64_t most) {
  const at::Tensor sorted =
      at::argsort(experts_of.flatten(), /*stable=*/true, /*dim=*/0,
                  /*descending=*/false);
  const int64_t count = std::min(sorted.size(0), most);
  const at::Tensor choice = sorted.narrow(0, 0, count);
  const at::Tensor row =
      at::full({experts_of.numel()}, count, choice.options())
          .scatter_(0, choice, at::arange(count, choice.options()));
  return {choice, choice.floor_divide(experts_of.size(1)),
          row.view(experts_of.sizes())};
}

at::Tensor rows_of_tokens(const at::Tensor& x, const RowOrder& order) {
  if (!takes_kernel(x)) return x.index_select(0, order.token);
  return RowsOfTokens::apply(x.contiguous(), order.token, order.row);
}

at::Tensor tokens_of_rows(const at::Tensor& rows, const at::Tensor& weights,
                          const RowOrder& order) {
  if (takes_kernel(rows)) {
    return TokensOfRows::apply(rows.contiguous(), weights.contiguous(),
                               order.row);
  }
  const int64_t count = rows.size(0);
  const at::Tensor weight =
      weights.flatten()
          .index_select(0, order.choice.narrow(0, 0, count))
          .to(rows.scalar_type());
  return at::zeros({weights.size(0), rows.size(1)}, rows.options())
      .index_add(0, order.token.narrow(0, 0, count),
                 rows * weight.unsqueeze(1));
}

}  // namespace tessera::nn
