#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")  // which vectorises; -O2 does so only half-heartedly
#endif
#include "tessera/nn/detail/cpu_kernels.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <cmath>

#include "tessera/nn/wide_type.h"

namespace tessera::nn::detail {
namespace {

constexpr int64_t kLanes = 16;        // partial sums that run side by side
constexpr int64_t kRowsPerPart = 64;  // rows that one thread takes at a time

template <typename T>
using Wide = at::opmath_type<T>;

// Sum of term(i) over [0, n), in an order that depends on n alone.
template <typename W, typename Term>
inline W sum_of(int64_t n, const Term& term) {
  W lanes[kLanes] = {};
  const int64_t whole = n - n % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += term(i + l);
  }
  for (int64_t i = whole; i < n; ++i) lanes[i - whole] += term(i);
  W sum = 0;
  for (const W lane : lanes) sum += lane;
  return sum;
}

template <typename T>
void rms_norm_row(const T* __restrict x, const T* __restrict weight,
                  T* __restrict y, int64_t width, Wide<T> scale) {
  using W = Wide<T>;
  for (int64_t i = 0; i < width; ++i) {
    y[i] = static_cast<T>(static_cast<W>(x[i]) * scale *
                          static_cast<W>(weight[i]));
  }
}

// Adds the row's share of the weight's gradient to `into_weight`.
template <typename T>
void rms_norm_row_backward(const T* __restrict g, const T* __restrict x,
                           const T* __restrict weight, T* __restrict dx,
                           Wide<T>* __restrict into_weight, int64_t width,
                           Wide<T> scale) {
  using W = Wide<T>;
  const W along = sum_of<W>(width, [&](int64_t i) {
    return static_cast<W>(g[i]) * static_cast<W>(weight[i]) *
           static_cast<W>(x[i]);
  });
  const W pull = along * scale * scale * scale / static_cast<W>(width);
  for (int64_t i = 0; i < width; ++i) {
    const W gi = static_cast<W>(g[i]), xi = static_cast<W>(x[i]);
    into_weight[i] += gi * xi * scale;
    dx[i] = static_cast<T>(gi * static_cast<W>(weight[i]) * scale - xi * pull);
  }
}

template <typename T>
void rotate_head(const T* __restrict x, const Wide<T>* __restrict cos,
                 const Wide<T>* __restrict sin, T* __restrict y, int64_t half,
                 Wide<T> direction) {
  using W = Wide<T>;
  for (int64_t i = 0; i < half; ++i) {
    const W a = static_cast<W>(x[i]), b = static_cast<W>(x[i + half]);
    const W c = cos[i], s = sin[i] * direction;
    y[i] = static_cast<T>(a * c - b * s);
    y[i + half] = static_cast<T>(b * c + a * s);
  }
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    double eps) {
  const int64_t rows = x.size(0), width = x.size(1);
  at::Tensor y = at::empty_like(x);
  at::Tensor inverse_rms = at::empty({rows}, x.options().dtype(wide_type(x)));
  AT_DISPATCH_FLOATING_TYPES_AND(
      at::kBFloat16, x.scalar_type(), "rms_norm", [&] {
        using W = Wide<scalar_t>;
        const scalar_t* in = x.const_data_ptr<scalar_t>();
        const scalar_t* w = weight.const_data_ptr<scalar_t>();
        scalar_t* out = y.mutable_data_ptr<scalar_t>();
        W* scales = inverse_rms.mutable_data_ptr<W>();
        at::parallel_for(
            0, rows, kRowsPerPart, [&](int64_t begin, int64_t end) {
              for (int64_t r = begin; r < end; ++r) {
                const scalar_t* row = in + r * width;
                const W squares = sum_of<W>(width, [&](int64_t i) {
                  return static_cast<W>(row[i]) * static_cast<W>(row[i]);
                });
                scales[r] = 1 / std::sqrt(squares / static_cast<W>(width) +
                                          static_cast<W>(eps));
                rms_norm_row(row, w, out + r * width, width, scales[r]);
              }
            });
      });
  return {y, inverse_rms};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
    const at::Tensor& inverse_rms) {
  const int64_t rows = x.size(0), width = x.size(1);
  const int64_t parts = (rows + kRowsPerPart - 1) / kRowsPerPart;
  at::Tensor dx = at::empty_like(x);
  at::Tensor partial = at::zeros({parts, width}, inverse_rms.options());
  AT_DISPATCH_FLOATING_TYPES_AND(
      at::kBFloat16, x.scalar_type(), "rms_norm", [&] {
        using W = Wide<scalar_t>;
        const scalar_t* g = gradient.const_data_ptr<scalar_t>();
        const scalar_t* in = x.const_data_ptr<scalar_t>();
        const scalar_t* w = weight.const_data_ptr<scalar_t>();
        const W* scales = inverse_rms.const_data_ptr<W>();
        scalar_t* out = dx.mutable_data_ptr<scalar_t>();
        W* into = partial.mutable_data_ptr<W>();
        at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
          for (int64_t r = begin * kRowsPerPart;
               r < std::min(rows, end * kRowsPerPart); ++r) {
            rms_norm_row_backward(
                g + r * width, in + r * width, w, out + r * width,
                into + r / kRowsPerPart * width, width, scales[r]);
          }
        });
      });
  return {dx, partial.sum(0).to(weight.scalar_type())};
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos,
                  const at::Tensor& sin, double direction) {
  const int64_t tokens = x.size(1), heads = x.size(2), width = x.size(3);
  at::Tensor y = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, x.scalar_type(), "rotate", [&] {
    using W = Wide<scalar_t>;
    const scalar_t* in = x.const_data_ptr<scalar_t>();
    const W* c = cos.const_data_ptr<W>();
    const W* s = sin.const_data_ptr<W>();
    scalar_t* out = y.mutable_data_ptr<scalar_t>();
    const int64_t half = width / 2, rows = x.size(0) * tokens;
    at::parallel_for(0, rows, kRowsPerPart, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t angle = r % tokens * half;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t at = (r * heads + h) * width;
          rotate_head(in + at, c + angle, s + angle, out + at, half,
                      static_cast<W>(direction));
        }
      }
    });
  });
  return y;
}

}  // namespace tessera::nn::detail
