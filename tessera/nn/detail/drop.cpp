#include "tessera/nn/detail/drop.h"

#include <ATen/ATen.h>

#include <vector>

#include "tessera/nn/detail/mask.h"
#include "tessera/nn/gpu/one_pass.h"
#include "tessera/nn/gpu/program.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn::detail {
namespace {

constexpr int64_t kColumns = 64, kCounters = 16, kWord = 0xffffffff;

// Of words of 32 bits in int64, whose products keep their lowest 64.
at::Tensor upper_half(const at::Tensor& product) {
  return at::bitwise_and(at::bitwise_right_shift(product, 32), kWord);
}

// core/random.h's philox4x32_10, of counters that are broadcast together.
std::vector<at::Tensor> philox(std::vector<at::Tensor> words,
                               const kernels::Mask& mask) {
  constexpr int64_t kMultipliers[] = {0xD2511F53, 0xCD9E8D57};
  uint32_t key0 = mask.key[0], key1 = mask.key[1];
  for (int round = 0; round < 10; ++round) {
    const at::Tensor product0 = words[0] * kMultipliers[0];
    const at::Tensor product1 = words[2] * kMultipliers[1];
    words = {at::bitwise_xor(at::bitwise_xor(upper_half(product1), words[1]),
                             int64_t{key0}),
             at::bitwise_and(product1, kWord),
             at::bitwise_xor(at::bitwise_xor(upper_half(product0), words[3]),
                             int64_t{key1}),
             at::bitwise_and(product0, kWord)};
    key0 += 0x9E3779B9, key1 += 0xBB67AE85;
  }
  return words;
}

// What each element of x (B, H, T, D) is multiplied by, in the wide type.
at::Tensor shares_for(const at::Tensor& x, const kernels::Mask& mask,
                      const MaskPlace& place) {
  const int64_t past = place.first_column % kColumns;
  const int64_t first = place.first_column - past, width = x.size(3);
  const int64_t runs = (past + width + kColumns - 1) / kColumns;
  const auto count = [&](int64_t from, int64_t length, at::IntArrayRef along) {
    return at::arange(from, from + length, x.options().dtype(at::kLong))
        .view(along);
  };
  const auto words =
      philox({count(first / kColumns * kCounters, runs * kCounters,
                    {1, 1, 1, runs, kCounters}),
              count(place.first_row, x.size(2), {1, 1, -1, 1, 1}),
              count(mask.head, x.size(1), {1, -1, 1, 1, 1}),
              count(mask.sample, x.size(0), {-1, 1, 1, 1, 1})},
             mask);
  const at::Tensor drawn =
      at::stack(at::broadcast_tensors(words), /*dim=*/4)
          .view({x.size(0), x.size(1), x.size(2), runs * kColumns})
          .narrow(3, past, width);
  return at::ge(drawn, int64_t{mask.drops}).to(wide_type(x)).mul_(mask.scale);
}

}  // namespace

void drop_there(const at::Tensor& past, const at::Tensor& x,
                const at::Tensor& y, const Dropout& dropout,
                const MaskPlace& place) {
  const kernels::Mask mask = mask_of(dropout, 0, 0);
  if (gpu::runs(x)) {
    return gpu::drop(past, x, y, mask, place.first_row, place.first_column);
  }
  const at::Tensor kept = shares_for(x, mask, place).mul_(x);
  y.copy_(past.defined() ? kept.add_(past) : kept);
}

}  // namespace tessera::nn::detail
