#include "tessera/benchmark/pattern.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "tessera/core/error.h"

namespace tessera::benchmark {
namespace {

constexpr int64_t kHashes = 127;  // the largest number that int8 holds

// Sebastiano Vigna's splitmix64: its upper bits are even.
uint8_t hash_of(uint64_t i) {
  uint64_t x = i + 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return static_cast<uint8_t>((x >> 33) % kHashes);
}

// What each hash stands for, in the dtype of a tensor.
at::Tensor table(at::ScalarType dtype,
                 const std::function<double(int64_t)>& value_of) {
  at::Tensor values = at::empty({kHashes}, at::kDouble);
  for (int64_t hash = 0; hash < kHashes; ++hash) {
    values.data_ptr<double>()[hash] = value_of(hash);
  }
  return values.to(dtype);
}

// Calls `body(Word{})` with an unsigned type as wide as an element: values are
// looked up and compared as bits, whatever they stand for.
template <typename Body>
auto with_word_of(const at::Tensor& tensor, Body body) {
  switch (tensor.element_size()) {
    case 1:
      return body(uint8_t{});
    case 2:
      return body(uint16_t{});
    case 4:
      return body(uint32_t{});
    default:
      return body(uint64_t{});
  }
}

template <typename Word>
std::array<Word, kHashes> words_of(const at::Tensor& table) {
  std::array<Word, kHashes> words;
  std::memcpy(words.data(), table.const_data_ptr(), sizeof words);
  return words;
}

int64_t count_other_bits(const at::Tensor& tensor, const uint8_t* hashes,
                         const at::Tensor& table) {
  return with_word_of(tensor, [&]<typename Word>(Word) {
    const auto words = words_of<Word>(table);
    const auto* got = static_cast<const Word*>(tensor.const_data_ptr());
    int64_t count = 0;
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      count += got[i] != words[hashes[i]] ? 1 : 0;
    }
    return count;
  });
}

double epsilon_of(at::ScalarType dtype) {
  if (!at::isFloatingType(dtype)) return 0;
  if (dtype == at::kBFloat16) return std::ldexp(1.0, -7);
  if (dtype == at::kHalf) return std::ldexp(1.0, -10);
  return dtype == at::kFloat ? std::numeric_limits<float>::epsilon()
                             : std::numeric_limits<double>::epsilon();
}

// One rank in so many is another than the rest, and of all ranks no more than
// `most`. No multiple of 3: then 3 rank has each remainder equally often.
int64_t one_rank_in(int64_t ranks, int64_t most, int64_t least) {
  const int64_t each = std::max(least, (ranks + most - 1) / most);
  return each % 3 == 0 ? each + 1 : each;
}

}  // namespace

Pattern::Pattern(int64_t numel, int64_t ranks) : ranks_(ranks), hash_(numel) {
  for (size_t i = 0; i < hash_.size(); ++i) hash_[i] = hash_of(i);
}

double Pattern::value(int64_t hash, int64_t rank, int64_t round,
                      Redop redop) const {
  const int64_t mixed = hash + 3 * rank + round;
  // int8 holds 2^6, and a sum of 127.
  if (redop == comm::ReduceOp::kProduct) {
    return mixed % one_rank_in(ranks_, 6, 8) == 0 ? 2 : 1;
  }
  const int64_t numbers = redop ? 127 / ranks_ : 127;
  if (numbers > 1) return static_cast<double>(1 + mixed % numbers);
  return mixed % one_rank_in(ranks_, 127, 2) == 0 ? 1 : 0;
}

double Pattern::reduced(int64_t hash, int64_t round,
                        comm::ReduceOp redop) const {
  double result = value(hash, 0, round, redop);
  for (int64_t rank = 1; rank < ranks_; ++rank) {
    const double next = value(hash, rank, round, redop);
    switch (redop) {
      case comm::ReduceOp::kSum:
      case comm::ReduceOp::kMean:
        result += next;
        break;
      case comm::ReduceOp::kMin:
        result = std::min(result, next);
        break;
      case comm::ReduceOp::kMax:
        result = std::max(result, next);
        break;
      case comm::ReduceOp::kProduct:
        result *= next;
        break;
    }
  }
  const bool is_mean = redop == comm::ReduceOp::kMean;
  return is_mean ? result / static_cast<double>(ranks_) : result;
}

const uint8_t* Pattern::hashes(int64_t first, int64_t numel) const {
  TORCH_INTERNAL_ASSERT(first + numel <= static_cast<int64_t>(hash_.size()));
  return hash_.data() + first;
}

void Pattern::write(at::Tensor tensor, int64_t rank, int64_t round, Redop redop,
                    int64_t first) const {
  const uint8_t* hash = hashes(first, tensor.numel());
  const at::Tensor values = table(tensor.scalar_type(), [&](int64_t h) {
    return value(h, rank, round, redop);
  });
  with_word_of(tensor, [&]<typename Word>(Word) {
    const auto words = words_of<Word>(values);
    auto* out = static_cast<Word*>(tensor.mutable_data_ptr());
    for (int64_t i = 0; i < tensor.numel(); ++i) out[i] = words[hash[i]];
  });
}

int64_t Pattern::count_not_of(const at::Tensor& tensor, int64_t rank,
                              int64_t round, int64_t first) const {
  const at::Tensor expected = table(tensor.scalar_type(), [&](int64_t h) {
    return value(h, rank, round, std::nullopt);
  });
  return count_other_bits(tensor, hashes(first, tensor.numel()), expected);
}

int64_t Pattern::count_not_reduced(const at::Tensor& tensor, int64_t round,
                                   comm::ReduceOp redop, int64_t first) const {
  const uint8_t* hash = hashes(first, tensor.numel());
  const auto expected = [&](int64_t h) { return reduced(h, round, redop); };
  const int64_t other =
      count_other_bits(tensor, hash, table(tensor.scalar_type(), expected));
  if (other == 0 || redop != comm::ReduceOp::kMean) return other;
  const at::Tensor got = tensor.to(at::kDouble);
  const at::Tensor wanted = table(at::kDouble, expected);
  const double bound = 2 * epsilon_of(tensor.scalar_type());
  int64_t count = 0;
  for (int64_t i = 0; i < got.numel(); ++i) {
    const double right = wanted.const_data_ptr<double>()[hash[i]];
    const double off = got.const_data_ptr<double>()[i] - right;
    count += std::abs(off) <= bound * right ? 0 : 1;  // NaN is wrong too
  }
  return count;
}

}  // namespace tessera::benchmark
