#include "tessera/nn/detail/one_pass.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/core/parallel.h"
#include "tessera/nn/detail/kernel_table.h"
#include "tessera/nn/gpu/one_pass.h"
#include "tessera/nn/gpu/program.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn::detail {
namespace {

using kernels::Element;

// What one thread takes at a time.
constexpr int64_t kRowsPerPart = 64;
constexpr int64_t kElementsPerPart = int64_t{1} << 14;

}  // namespace

bool has_loops(const at::Tensor& x) { return x.is_cpu() || gpu::runs(x); }

std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    double eps, double offset) {
  if (!x.is_cpu()) return gpu::rms_norm_forward(x, weight, eps, offset);
  RECORD_FUNCTION("tessera::rms_norm_forward", {});
  const int64_t width = x.size(-1), rows = x.numel() / width;
  at::Tensor y = at::empty_like(x);
  at::Tensor inverse_rms = at::empty({rows}, x.options().dtype(wide_type(x)));
  const Element element = element_of(x);
  parallel_for(0, rows, kRowsPerPart, [&](int64_t begin, int64_t end) {
    table().rms_norm(element, elements_from(x, begin * width),
                     weight.data_ptr(), elements_from(y, begin * width),
                     elements_from(inverse_rms, begin), end - begin, width, eps,
                     offset);
  });
  return {y, inverse_rms};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
    const at::Tensor& inverse_rms, double offset, const at::Tensor& past) {
  if (!x.is_cpu()) {
    return gpu::rms_norm_backward(gradient, x, weight, inverse_rms, offset,
                                  past);
  }
  RECORD_FUNCTION("tessera::rms_norm_backward", {});
  const int64_t width = x.size(-1), rows = x.numel() / width;
  const int64_t parts = (rows + kRowsPerPart - 1) / kRowsPerPart;
  at::Tensor dx = at::empty_like(x);
  at::Tensor partial = at::zeros({parts, width}, inverse_rms.options());
  const Element element = element_of(x);
  parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t first = part * kRowsPerPart;
      table().rms_norm_backward(
          element, elements_from(gradient, first * width),
          elements_from(x, first * width), weight.data_ptr(),
          elements_from(inverse_rms, first),
          past.defined() ? elements_from(past, first * width) : nullptr,
          elements_from(dx, first * width),
          elements_from(partial, part * width),
          std::min(kRowsPerPart, rows - first), width, offset);
    }
  });
  return {dx, partial.sum(0).to(weight.scalar_type())};
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos,
                  const at::Tensor& sin, double direction, bool in_place) {
  if (!x.is_cpu()) return gpu::rotate(x, cos, sin, direction, in_place);
  RECORD_FUNCTION("tessera::rotate", {});
  const int64_t tokens = x.size(1), heads = x.size(2), width = x.size(3);
  at::Tensor y = in_place ? x.variable_data() : at::empty_like(x);
  const Element element = element_of(x);
  const int64_t rows = x.size(0) * tokens, half = width / 2;
  parallel_for(0, rows, kRowsPerPart, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t angle = r % tokens * half, at = r * heads * width;
      table().rotate(element, elements_from(x, at), elements_from(cos, angle),
                     elements_from(sin, angle), elements_from(y, at), heads,
                     width, direction);
    }
  });
  return y;
}

at::Tensor glu(Gate kind, const at::Tensor& gate, const at::Tensor& up) {
  const bool is_silu = kind == Gate::kSilu;
  if (!up.is_cpu()) return gpu::glu(is_silu, gate, up);
  RECORD_FUNCTION(is_silu ? "tessera::swiglu" : "tessera::geglu", {});
  const auto loop = is_silu ? table().swiglu : table().geglu;
  at::Tensor y = at::empty_like(up);
  const Element element = element_of(up);
  parallel_for(
      0, up.numel(), kElementsPerPart, [&](int64_t begin, int64_t end) {
        loop(element, elements_from(gate, begin), elements_from(up, begin),
             elements_from(y, begin), end - begin);
      });
  return y;
}

std::tuple<at::Tensor, at::Tensor> glu_backward(Gate kind,
                                                const at::Tensor& gradient,
                                                const at::Tensor& gate,
                                                const at::Tensor& up) {
  const bool is_silu = kind == Gate::kSilu;
  if (!up.is_cpu()) return gpu::glu_backward(is_silu, gradient, gate, up);
  RECORD_FUNCTION(
      is_silu ? "tessera::swiglu_backward" : "tessera::geglu_backward", {});
  const auto loop = is_silu ? table().swiglu_backward : table().geglu_backward;
  at::Tensor dgate = at::empty_like(gate), dup = at::empty_like(up);
  const Element element = element_of(up);
  parallel_for(0, up.numel(), kElementsPerPart,
               [&](int64_t begin, int64_t end) {
                 loop(element, elements_from(gradient, begin),
                      elements_from(gate, begin), elements_from(up, begin),
                      elements_from(dgate, begin), elements_from(dup, begin),
                      end - begin);
               });
  return {dgate, dup};
}

at::Tensor gelu_tanh(const at::Tensor& x) {
  RECORD_FUNCTION("tessera::gelu", {});
  at::Tensor y = at::empty_like(x);
  parallel_for(0, x.numel(), kElementsPerPart, [&](int64_t begin, int64_t end) {
    table().gelu(element_of(x), elements_from(x, begin),
                 elements_from(y, begin), end - begin);
  });
  return y;
}

at::Tensor gelu_tanh_backward(const at::Tensor& gradient, const at::Tensor& x) {
  RECORD_FUNCTION("tessera::gelu_backward", {});
  at::Tensor dx = at::empty_like(x);
  parallel_for(0, x.numel(), kElementsPerPart, [&](int64_t begin, int64_t end) {
    table().gelu_backward(element_of(x), elements_from(gradient, begin),
                          elements_from(x, begin), elements_from(dx, begin),
                          end - begin);
  });
  return dx;
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         int64_t ignored, std::optional<double> scale) {
  // For autograd, which does not see loops write.
  if (scale) logits.unsafeGetTensorImpl()->bump_version();
  if (!logits.is_cpu()) {
    return gpu::cross_entropy(logits, targets, ignored, scale);
  }
  RECORD_FUNCTION("tessera::cross_entropy", {});
  constexpr int64_t kRows = 4;
  const int64_t rows = logits.size(0), width = logits.size(1);
  const int64_t* const target = targets.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < rows; ++r) {
    TS_CHECK(target[r] == ignored || (target[r] >= 0 && target[r] < width),
             "cross_entropy: a target is ", target[r],
             ", outside the vocabulary of ", width, " entries.");
  }
  const at::Tensor losses = at::empty({rows}, at::kDouble);
  auto* const loss = losses.mutable_data_ptr<double>();
  const Element element = element_of(logits);
  parallel_for(0, rows, kRows, [&](int64_t begin, int64_t end) {
    table().cross_entropy(element, elements_from(logits, begin * width),
                          target + begin, loss + begin, end - begin, width,
                          scale ? &*scale : nullptr);
  });
  double sum = 0;
  for (int64_t r = 0; r < rows; ++r) sum += loss[r];
  return at::scalar_tensor(sum, at::kDouble);
}

at::Tensor add_up_rows(const at::Tensor& rows, const at::Tensor& row,
                       const at::Tensor& weights) {
  if (!rows.is_cpu()) return gpu::add_up_rows(rows, row, weights);
  RECORD_FUNCTION("tessera::add_up_rows", {});
  const int64_t tokens = row.size(0), choices = row.size(1);
  const int64_t count = rows.size(0), width = rows.size(1);
  at::Tensor y = at::empty({tokens, width}, rows.options());
  const int64_t* const from = row.const_data_ptr<int64_t>();
  parallel_for(0, tokens, kRowsPerPart, [&](int64_t begin, int64_t end) {
    table().add_up_rows(
        element_of(rows), rows.data_ptr(), from + begin * choices,
        weights.defined() ? elements_from(weights, begin * choices) : nullptr,
        elements_from(y, begin * width), end - begin, choices, count, width);
  });
  return y;
}

std::tuple<at::Tensor, at::Tensor> add_up_rows_backward(
    const at::Tensor& gradient, const at::Tensor& rows, const at::Tensor& row,
    const at::Tensor& weights) {
  if (!rows.is_cpu()) {
    return gpu::add_up_rows_backward(gradient, rows, row, weights);
  }
  RECORD_FUNCTION("tessera::add_up_rows_backward", {});
  const int64_t tokens = row.size(0), choices = row.size(1);
  const int64_t count = rows.size(0), width = rows.size(1);
  at::Tensor drows = at::empty_like(rows), dweights = at::empty_like(weights);
  const int64_t* const from = row.const_data_ptr<int64_t>();
  parallel_for(0, tokens, kRowsPerPart, [&](int64_t begin, int64_t end) {
    const int64_t choice = begin * choices;
    table().add_up_rows_backward(
        element_of(rows), elements_from(gradient, begin * width),
        rows.data_ptr(), from + choice, elements_from(weights, choice),
        drows.data_ptr(), elements_from(dweights, choice), end - begin, choices,
        count, width);
  });
  return {drows, dweights};
}

void add_to_wide(const at::Tensor& sums, const at::Tensor& x) {
  RECORD_FUNCTION("tessera::add_to_wide", {});
  const Element element = element_of(x);
  parallel_for(0, x.numel(), kElementsPerPart, [&](int64_t begin, int64_t end) {
    table().add(element, elements_from(sums, begin), elements_from(x, begin),
                end - begin);
  });
}

// Each thread has columns of its own: the order of a sum is that of the ids.
void add_rows(const at::Tensor& table, const at::Tensor& ids,
              const at::Tensor& rows) {
  RECORD_FUNCTION("tessera::add_rows", {});
  constexpr int64_t kColumnsPerPart = 64;
  const int64_t width = table.size(1), count = ids.numel();
  const int64_t* const id = ids.const_data_ptr<int64_t>();
  const auto add = [&]<typename Sum, typename Row>(Sum* sums, const Row* row) {
    parallel_for(0, width, kColumnsPerPart, [&](int64_t begin, int64_t end) {
      for (int64_t i = 0; i < count; ++i) {
        Sum* const to = sums + id[i] * width;
        const Row* const from = row + i * width;
        for (int64_t c = begin; c < end; ++c) {
          to[c] += static_cast<Sum>(from[c]);
        }
      }
    });
  };
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, table.scalar_type(), "add_rows", [&] {
        auto* const sums = table.mutable_data_ptr<scalar_t>();
        AT_DISPATCH_FLOATING_TYPES_AND2(
            at::kBFloat16, at::kHalf, rows.scalar_type(), "add_rows",
            [&] { add(sums, rows.const_data_ptr<scalar_t>()); });
      });
}

}  // namespace tessera::nn::detail
