#include "tessera/nn/dropout.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <algorithm>
#include <torch/csrc/autograd/custom_function.h>

#include <bit>
#include <optional>

#include "tessera/core/hash.h"
#include "tessera/core/parallel.h"
#include "tessera/nn/detail/drop.h"
#include "tessera/nn/detail/kernel_table.h"
#include "tessera/nn/detail/mask.h"
#include "tessera/nn/detail/second_derivatives.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kRowsPerPart = 64;

c10::IValue as_saved(const Positions& positions) {
  std::vector<int64_t> numbers;
  for (const auto& [begin, length] : positions) {
    numbers.insert(numbers.end(), {begin, length});
  }
  return numbers;
}

Positions saved_positions(const c10::IValue& saved) {
  const auto numbers = saved.toIntVector();
  Positions positions;
  for (size_t i = 0; i < numbers.size(); i += 2) {
    positions.emplace_back(numbers[i], numbers[i + 1]);
  }
  return positions;
}

// y = past + what is kept of x, of a run of tokens (B, T, D) on the CPU, of
// which samples may lie apart; the first is at `first`.
void keep_run(const at::Tensor& past, const at::Tensor& x, const at::Tensor& y,
              const Dropout& dropout, int64_t first) {
  const int64_t length = x.size(1), width = x.size(2);
  const kernels::Element element = detail::element_of(x);
  parallel_for(
      0, x.size(0) * length, kRowsPerPart, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; ++i) {
          const int64_t b = i / length, t = i % length;
          const int64_t at = b * x.stride(0) + t * width;
          detail::table().drop(
              element, detail::mask_of(dropout, b, 0), first + t,
              past.defined() ? detail::elements_from(past, at) : nullptr,
              detail::elements_from(x, at), detail::elements_from(y, at),
              width);
        }
      });
}

// y = past + what is kept of x; y may be x. All contiguous.
void keep(const at::Tensor& past, const at::Tensor& x, const at::Tensor& y,
          const Dropout& dropout, const Positions& positions) {
  RECORD_FUNCTION("tessera::dropout", {});
  const at::NoGradGuard no_grad;
  int64_t begin = 0;  // of the run, among the tokens that are here
  for (const auto& [first, length] : positions) {
    const auto run = [from = begin, of = length](const at::Tensor& all) {
      return all.defined() ? all.narrow(1, from, of) : all;
    };
    if (x.is_cpu()) {
      keep_run(run(past), run(x), run(y), dropout, first);
    } else {
      const auto of_one_head = [&](const at::Tensor& all) {
        return all.defined() ? run(all).unsqueeze(1) : all;
      };
      detail::drop_there(of_one_head(past), of_one_head(x), of_one_head(y),
                         dropout, {.first_row = first});
    }
    begin += length;
  }
  TORCH_INTERNAL_ASSERT(begin == x.size(1), "positions of ", begin,
                        " tokens of ", x.size(1));
}

class AddKept : public torch::autograd::Function<AddKept> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const std::optional<at::Tensor>& past,
                            const at::Tensor& x, const Dropout& dropout,
                            const Positions& positions) {
    ctx->saved_data["dropout"] = nn::as_saved(dropout);
    ctx->saved_data["positions"] = as_saved(positions);
    const at::Tensor before = past.value_or(at::Tensor());
    ctx->saved_data["adds"] = before.defined();
    const bool in_place = !x.is_view() && x.is_contiguous();
    const at::Tensor y = in_place ? x : at::empty(x.sizes(), x.options());
    keep(before.defined() ? before.contiguous() : before, x.contiguous(), y,
         dropout, positions);
    if (in_place) ctx->mark_dirty({y});
    return y;
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    detail::refuse_second_derivatives("Dropout");
    const at::Tensor gradient = gradients[0].contiguous();
    at::Tensor dx = at::empty(gradient.sizes(), gradient.options());
    keep({}, gradient, dx, saved_dropout(ctx->saved_data["dropout"]),
         saved_positions(ctx->saved_data["positions"]));
    const bool adds = ctx->saved_data["adds"].toBool();
    return {adds ? gradient : at::Tensor(), std::move(dx), {}, {}};
  }
};

}  // namespace

Dropout dropout_named(const std::string& name, double rate, const Draw& draw) {
  const uint64_t key =
      hash128("dropout." + std::to_string(draw.step) + "." + name, draw.seed)
          .low;
  return {.rate = rate,
          .key = {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)},
          .first_sample = draw.first_sample};
}

c10::IValue as_saved(const Dropout& dropout) {
  return std::vector<int64_t>{std::bit_cast<int64_t>(dropout.rate),
                              int64_t{dropout.key[0]}, int64_t{dropout.key[1]},
                              dropout.first_sample, dropout.first_head};
}

Dropout saved_dropout(const c10::IValue& saved) {
  const auto numbers = saved.toIntVector();
  return {.rate = std::bit_cast<double>(numbers[0]),
          .key = {static_cast<uint32_t>(numbers[1]),
                  static_cast<uint32_t>(numbers[2])},
          .first_sample = numbers[3],
          .first_head = numbers[4]};
}

Positions part_of(const Positions& positions, int64_t begin, int64_t length) {
  int64_t past = begin, left = length;
  Positions part;
  for (const auto& [first, all] : positions) {
    const int64_t skipped = std::min(past, all);
    const int64_t taken = std::min(left, all - skipped);
    if (taken > 0) part.emplace_back(first + skipped, taken);
    past -= skipped, left -= taken;
  }
  return part;
}

at::Tensor each_of(const Positions& positions,
                   const at::TensorOptions& options) {
  std::vector<at::Tensor> runs = {at::empty({0}, options)};
  for (const auto& [first, length] : positions) {
    runs.push_back(at::arange(first, first + length, options));
  }
  return at::cat(runs);
}

at::Tensor add_kept(const at::Tensor& past, const at::Tensor& x,
                    const Dropout& dropout, const Positions& positions) {
  return AddKept::apply(std::optional(past), x, dropout, positions);
}

}  // namespace tessera::nn
