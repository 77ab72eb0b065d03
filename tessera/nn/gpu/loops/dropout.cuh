// Dropout.

// Mask of nn/kernels/kernels.h.
struct Mask {
  unsigned key[2];
  unsigned drops, sample, head;
  double scale;
};

struct Words {
  unsigned of[4];
};

// core/random.h's philox4x32_10.
__device__ inline Words philox(Words words, const Mask& mask) {
  unsigned key0 = mask.key[0], key1 = mask.key[1];
  TESSERA_UNROLL for (int round = 0; round < 10; ++round) {
    const auto product0 = 0xD2511F53ull * words.of[0],
               product1 = 0xCD9E8D57ull * words.of[2];
    words = {{static_cast<unsigned>(product1 >> 32) ^ words.of[1] ^ key0,
              static_cast<unsigned>(product1),
              static_cast<unsigned>(product0 >> 32) ^ words.of[3] ^ key1,
              static_cast<unsigned>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return words;
}

// Rows of (samples, heads, tokens, width), of which samples are `stride` apart;
// the first row and column of each mask that is for them.
struct DroppedRows {
  long long rows, heads, tokens, width, stride, first_row, first_column;
};

// y = what is kept of x, with `past` added unless it is null; y may be x. A
// thread has the columns that one counter's words are for: 16 apart.
template <typename T>
__device__ void drop(const T* past, const T* x, T* y, const Mask& mask,
                     const DroppedRows& of) {
  using W = Wide<T>;
  const W scale = static_cast<W>(mask.scale);
  const long long first = of.first_column / 64 * 16;
  const long long counters =
      (of.first_column + of.width + 63) / 64 * 16 - first;
  for_each_element(of.rows * counters, [&](long long i) {
    const long long r = i / counters, c = first + i % counters;
    const long long of_heads = r / of.tokens, t = r % of.tokens;
    const long long b = of_heads / of.heads, h = of_heads % of.heads;
    const long long row = b * of.stride + (h * of.tokens + t) * of.width;
    const Words words = philox(
        {{static_cast<unsigned>(c), static_cast<unsigned>(of.first_row + t),
          static_cast<unsigned>(mask.head + h),
          static_cast<unsigned>(mask.sample + b)}},
        mask);
    TESSERA_UNROLL for (int w = 0; w < 4; ++w) {
      const long long at = c / 16 * 64 + w * 16 + c % 16 - of.first_column;
      if (at < 0 || at >= of.width) continue;
      const W kept = words.of[w] < mask.drops ? 0 : scale;
      const W before = past != nullptr ? wide(past[row + at]) : 0;
      store(y + row + at, before + wide(x[row + at]) * kept);
    }
  });
}
