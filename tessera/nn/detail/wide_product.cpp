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

// A block of the left factor that is as long would have few rows: then sums are
// taken in parts, which fp32 keeps.
bool is_deep(int64_t inner) { return inner > 2 * kernels::kProductInner; }

struct Numbers {
  int64_t packed, sums, scratch, threads;  // scratch: of each
};
Numbers numbers_of(int64_t rows, int64_t inner, int64_t columns, bool into_wide,
                   int64_t threads) {
  const bool by_parts = is_deep(inner) && !into_wide;
  const int64_t at_once = columns_at_once(inner, columns);
  return {.packed = inner * at_once,
          .sums = by_parts ? rows * at_once : 0,
          .scratch = kernels::product_scratch(rows, inner),
          .threads = std::clamp(rows / kRowsOfAThread, int64_t{1}, threads)};
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
  const Numbers numbers = numbers_of(rows, in, out, into_wide, threads);
  return numbers.packed + numbers.sums + numbers.threads * numbers.scratch;
}

void wide_product(const kernels::Kernels& by, const at::Tensor& y,
                  const at::Tensor& a, const at::Tensor& b, bool adds) {
  const int64_t rows = a.size(0), inner = a.size(1), columns = b.size(1);
  const bool into_wide = y.scalar_type() == at::kFloat;
  const Numbers numbers =
      numbers_of(rows, inner, columns, into_wide,
                 at::in_parallel_region() ? 1 : at::get_num_threads());
  const auto wide = a.options().dtype(at::kFloat);
  const at::Tensor left = along_memory(a), all_of_b = along_memory(b);
  const at::Tensor packed = at::empty({numbers.packed}, wide);
  const at::Tensor sums = at::empty({numbers.sums}, wide);
  const at::Tensor scratch =
      at::empty({numbers.threads, numbers.scratch}, wide);
  float* const right = packed.mutable_data_ptr<float>();
  const kernels::Element element = element_of(a);
  const int64_t grain = (rows + numbers.threads - 1) / numbers.threads;
  const int64_t at_once = columns_at_once(inner, columns);
  for (int64_t first = 0; first < columns; first += at_once) {
    const int64_t here = std::min(at_once, columns - first);
    const at::Tensor of_b = all_of_b.narrow(1, first, here);
    const at::Tensor of_y = y.narrow(1, first, here);
    parallel_for(0, groups_of(here), 1, [&](int64_t begin, int64_t end) {
      by.pack_right(element, factor_of(of_b, 1), inner, here, begin,
                    end - begin, right);
    });
    const bool by_parts = numbers.sums > 0;
    const at::Tensor into =
        by_parts ? sums.narrow(0, 0, rows * here).view({rows, here}) : of_y;
    const kernels::WideProduct product = {.left = factor_of(left, 0),
                                          .right = right,
                                          .inner = inner,
                                          .columns = here,
                                          .y = into.mutable_data_ptr(),
                                          .y_row = into.stride(0),
                                          .into_wide = into_wide || by_parts,
                                          .adds = adds && !by_parts};
    parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      by.multiply_rows(element, product, begin, end - begin,
                       scratch[begin / grain].mutable_data_ptr<float>());
    });
    if (by_parts) adds ? of_y.add_(into) : of_y.copy_(into);
  }
}

}  // namespace tessera::nn::detail
