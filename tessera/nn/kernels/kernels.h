// The loops of detail/one_pass.h, compiled once for each set of vectors:
// over rows of one thread.
//
// Sources that include this are compiled for machines that may not be the one
// that starts the program: they include nothing whose inline functions others
// use too, for the linker keeps one copy of those.
#pragma once

#include <cstdint>

namespace tessera::nn::kernels {

// Of tensors; sums and factors are of Wide: fp64 for fp64, else fp32.
enum class Element { kF64, kF32, kBF16, kF16 };

// Of attention: tokens that are multiplied at once; queries that are shown each
// block of keys as it is packed, and keys each block of queries, in the
// backward; what widths are padded to.
inline constexpr int64_t kAttentionBlock = 64, kAttentionQueries = 256,
                         kAttentionKeys = 128, kAttentionPadding = 32;

// Tokens of a head, whose elements are contiguous: from token to token it is
// `stride` elements, from head to head `head_stride`.
struct Rows {
  void* data;
  int64_t stride, head_stride;
};

// What nn/dropout.h keeps of a sample's rows, and of a head: elements whose
// words are not below `drops`, times `scale`. 0 drops: all, as it is.
struct Mask {
  uint32_t key[2];
  uint32_t drops;
  uint32_t sample, head;
  double scale;
};

// One query head; lse (tokens) of Wide. Scores are scaled. Not causal: every
// query sees all keys. `window`: but of those so many before it alone, itself
// the last; 0: all. A query that then sees none gives 0, and as lse a number
// below every other. `first_query`, `first_key`: places in the sequence.
struct AttentionHead {
  Rows q, k, v, out;
  void* lse;
  int64_t tokens, keys, width;
  double scale;
  bool is_causal;
  Mask mask;
  int64_t first_query, first_key, window;
};

// The query heads that read one head of k and v; `mask` is that of the first.
struct AttentionGroup {
  Rows gradient, q, k, v, out;  // gradient: of out
  const void* lse;              // (heads, tokens), heads `lse_stride` apart
  int64_t lse_stride;
  Rows dq, dk, dv;
  int64_t heads, tokens, keys, width;
  double scale;
  bool is_causal;
  Mask mask;
  int64_t first_query, first_key, window;
};

// A factor of a product of matrices: its lines, rows of the left one and
// columns of the right one, are `line` elements apart, and what is summed over
// `k`; one of both is 1.
struct Factor {
  const void* data;
  int64_t line, k;
};

// y (rows, columns) = left right, or added, over `inner`; sums are fp32.
// `right`: as pack_right() wrote it. `into_wide`: y is fp32; else it is of the
// factors' type, and `inner` at most 2 * kProductInner.
struct WideProduct {
  Factor left;
  const float* right;
  int64_t inner, columns;
  void* y;
  int64_t y_row;
  bool into_wide, adds;
};
// What columns of the right factor are padded to; how deep panels are that are
// multiplied at once; and a block of the left one, in a thread's scratch: so
// many rows where they are up to kProductInner long, else fewer.
inline constexpr int64_t kProductColumns = 32, kProductDepth = 256,
                         kProductRows = 224, kProductInner = 1024;
// Numbers of it: sums and the block, each panel with a vector behind it.
constexpr int64_t product_scratch(int64_t rows, int64_t inner) {
  constexpr int64_t kPanel = 16;  // rows of one, at most
  const int64_t depths = (inner + kProductDepth - 1) / kProductDepth;
  const int64_t lines =
      rows + kPanel < kProductRows ? rows + kPanel : kProductRows;
  const int64_t whole = lines * depths * kProductDepth;
  constexpr int64_t kMost = kProductRows * kProductInner;
  const int64_t block = whole < kMost ? whole : kMost;
  return kProductRows * kProductColumns + block + block / 32;
}

struct Kernels {
  const char* name;
  // y = x * scale * (offset + weight), scale[r] = 1 / rms(x[r]).
  void (*rms_norm)(Element element, const void* x, const void* weight, void* y,
                   void* scales, int64_t rows, int64_t width, double eps,
                   double offset);
  // dx, with `past` added unless it is null; adds to dweight (width), of Wide.
  void (*rms_norm_backward)(Element element, const void* dy, const void* x,
                            const void* weight, const void* scales,
                            const void* past, void* dx, void* dweight,
                            int64_t rows, int64_t width, double offset);
  // Heads of one token: cos, sin of Wide (width / 2); `direction` 1 or -1.
  void (*rotate)(Element element, const void* x, const void* cos,
                 const void* sin, void* y, int64_t heads, int64_t width,
                 double direction);
  // y = silu(gate) * up.
  void (*swiglu)(Element element, const void* gate, const void* up, void* y,
                 int64_t count);
  void (*swiglu_backward)(Element element, const void* dy, const void* gate,
                          const void* up, void* dgate, void* dup,
                          int64_t count);
  // y = gelu(gate) * up.
  void (*geglu)(Element element, const void* gate, const void* up, void* y,
                int64_t count);
  void (*geglu_backward)(Element element, const void* dy, const void* gate,
                         const void* up, void* dgate, void* dup, int64_t count);
  // GPT-2's form, by tanh.
  void (*gelu)(Element element, const void* x, void* y, int64_t count);
  void (*gelu_backward)(Element element, const void* dy, const void* x,
                        void* dx, int64_t count);
  // losses[r] = log(sum e^z) - z[target], 0 where the target is negative. Then,
  // unless `scale` is null, z = (softmax(z) - onehot(target)) * scale, or 0.
  void (*cross_entropy)(Element element, void* z, const int64_t* targets,
                        double* losses, int64_t rows, int64_t width,
                        const double* scale);
  // y = past + x, of which the mask's part is kept; past may be null, and y x.
  void (*drop)(Element element, Mask mask, int64_t row, const void* past,
               const void* x, void* y, int64_t width);
  // Of each token: y = sum over its choices of weight * rows[row], where row is
  // below `count`; weights are of Wide, or null: each is 1.
  void (*add_up_rows)(Element element, const void* rows, const int64_t* row,
                      const void* weights, void* y, int64_t tokens,
                      int64_t choices, int64_t count, int64_t width);
  // The gradients of such rows and, of Wide, of all weights.
  void (*add_up_rows_backward)(Element element, const void* dy,
                               const void* rows, const int64_t* row,
                               const void* weights, void* drows, void* dweights,
                               int64_t tokens, int64_t choices, int64_t count,
                               int64_t width);
  // sums += x; sums are of Wide.
  void (*add)(Element element, void* sums, const void* x, int64_t count);
  // Of fp32, bf16 and fp16. Panels of kProductColumns columns of the right
  // factor (inner, columns): `count` from `first`, to packed + first * inner *
  // kProductColumns.
  void (*pack_right)(Element element, Factor of, int64_t inner, int64_t columns,
                     int64_t first, int64_t count, float* packed);
  // `count` rows of y, with a thread's product_scratch().
  void (*multiply_rows)(Element element, WideProduct of, int64_t first,
                        int64_t count, float* scratch);
  // kAttentionQueries queries from `first`, with a thread's scratch.
  void (*attend)(Element element, AttentionHead head, int64_t first,
                 void* scratch);
  void (*attend_backward)(Element element, AttentionGroup group, void* scratch);
};

// Numbers of Wide in the scratch of a thread.
constexpr int64_t attention_padded(int64_t size, int64_t to) {
  return (size + to - 1) / to * to;
}
constexpr int64_t attend_scratch(int64_t width, bool drops) {
  constexpr int64_t kBlocks = kAttentionQueries / kAttentionBlock;
  const int64_t padded = attention_padded(width, kAttentionPadding);
  return kAttentionBlock * ((2 + 2 * kBlocks) * padded +
                            (drops ? 2 : 1) * kAttentionBlock + 3 * kBlocks);
}
// Of (queries, keys) P, dS and, where bf16 is in pairs, dS the other way.
constexpr int64_t attend_backward_scratch(int64_t heads, int64_t tokens,
                                          int64_t width) {
  constexpr int64_t kBlocks = kAttentionKeys / kAttentionBlock;
  const int64_t padded = attention_padded(width, kAttentionPadding);
  return kAttentionBlock * ((2 + 5 * kBlocks) * padded + 3 * kAttentionBlock) +
         heads * attention_padded(tokens, kAttentionBlock) * (padded + 1);
}

// Elsewhere than on x86-64 all are the first.
extern const Kernels kBaseline, kAvx2, kAvx512;
// By core/vectors.h's Vectors.
inline constexpr const Kernels* kByVectors[] = {&kBaseline, &kAvx2, &kAvx512};
// kAvx512, but that attention of bf16 multiplies by bf16 arithmetic.
extern const Kernels kAvx512Bf16;

}  // namespace tessera::nn::kernels
