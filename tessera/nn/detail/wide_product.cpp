#include "tessera/nn/detail/wide_product.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "tessera/core/parallel.h"
#include "tessera/nn/detail/kernel_table.h"

namespace tessera::nn::detail {
namespace {

constexpr int64_t kColumns = kernels::kProductColumns;
constexpr int64_t kRowsOfAThread = 16;  // from which on a second one starts

int64_t groups_of(int64_t columns) {
  return (columns + kColumns - 1) / kColumns;
}

// Of the right factor, as many columns are packed at once.
int64_t columns_at_once(int64_t inner, int64_t columns) {
  constexpr int64_t kMost = 1024, kNumbers = int64_t{1} << 22;
  const int64_t fit =
      std::clamp(kNumbers / std::max(inner, int64_t{1}), kColumns, kMost);
  return std::min(fit / kColumns, groups_of(columns)) * kColumns;
}

struct Plan {
  int64_t at_once;  // columns of the right factor that are packed together
  bool by_parts;    // y's sums are taken in parts, which fp32 keeps
  int64_t threads;
  int64_t packed, sums, scratch;  // numbers of fp32; scratch: of each thread
};
Plan plan_of(int64_t rows, int64_t inner, int64_t columns, bool into_wide,
             int64_t threads) {
  // Of a block of the left factor that is longer few rows would fit.
  constexpr int64_t kMostInner = 2 * kernels::kProductInner;
  const int64_t at_once = columns_at_once(inner, columns);
  const bool by_parts = !into_wide && inner > kMostInner;
  return {.at_once = at_once,
          .by_parts = by_parts,
          .threads = std::clamp(rows / kRowsOfAThread, int64_t{1}, threads),
          .packed = inner * at_once,
          .sums = by_parts ? rows * at_once : 0,
          .scratch = kernels::product_scratch(rows, inner)};
}

at::Tensor along_memory(const at::Tensor& x) {
  return x.stride(0) == 1 || x.stride(1) == 1 ? x : x.contiguous();
}
// `line`: the dimension that the factor's lines are along.
kernels::Factor factor_of(const at::Tensor& x, int64_t line) {
  return {x.const_data_ptr(), x.stride(line), x.stride(1 - line)};
}

}  // namespace

int64_t wide_product_numbers(int64_t rows, int64_t in, int64_t out,
                             bool into_wide, int64_t threads) {
  const Plan plan = plan_of(rows, in, out, into_wide, threads);
  return plan.packed + plan.sums + plan.threads * plan.scratch;
}

void wide_product(const kernels::Kernels& by, const at::Tensor& y,
                  const at::Tensor& a, const at::Tensor& b, bool adds) {
  const int64_t rows = a.size(0), inner = a.size(1), columns = b.size(1);
  if (inner == 0) {  // there is no block to go through
    if (!adds) y.zero_();
    return;
  }
  const bool into_wide = y.scalar_type() == at::kFloat;
  const Plan plan =
      plan_of(rows, inner, columns, into_wide,
              at::in_parallel_region() ? 1 : at::get_num_threads());
  const auto wide = a.options().dtype(at::kFloat);
  const at::Tensor left = along_memory(a), all_of_b = along_memory(b);
  const at::Tensor packed = at::empty({plan.packed}, wide);
  const at::Tensor sums = at::empty({plan.sums}, wide);
  const at::Tensor scratch = at::empty({plan.threads, plan.scratch}, wide);
  float* const right = packed.mutable_data_ptr<float>();
  const kernels::Element element = element_of(a);
  const int64_t grain = (rows + plan.threads - 1) / plan.threads;
  for (int64_t first = 0; first < columns; first += plan.at_once) {
    const int64_t here = std::min(plan.at_once, columns - first);
    const at::Tensor of_b = all_of_b.narrow(1, first, here);
    const at::Tensor of_y = y.narrow(1, first, here);
    parallel_for(0, groups_of(here), 1, [&](int64_t begin, int64_t end) {
      by.pack_right(element, factor_of(of_b, 1), inner, here, begin,
                    end - begin, right);
    });
    const at::Tensor into =
        plan.by_parts ? sums.narrow(0, 0, rows * here).view({rows, here})
                      : of_y;
    const kernels::WideProduct product = {
        .left = factor_of(left, 0),
        .right = right,
        .inner = inner,
        .columns = here,
        .y = into.mutable_data_ptr(),
        .y_row = into.stride(0),
        .into_wide = into_wide || plan.by_parts,
        .adds = adds && !plan.by_parts};
    parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      by.multiply_rows(element, product, begin, end - begin,
                       scratch[begin / grain].mutable_data_ptr<float>());
    });
    if (plan.by_parts) adds ? of_y.add_(into) : of_y.copy_(into);
  }
}

}  // namespace tessera::nn::detail
