// The operators of a decoder on a tape: what each allocates, saves for its
// backward and frees, and how many floating-point operations it takes, as
// LibTorch's, nn's and comm's run on a CPU.
//
// Sizes:  numbers of elements: of `element` bytes, in sums of `wide`.
// Scratch of BLAS and of oneDNN inside of a product is not counted.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/trace/tape.h"
#include "tessera/nn/fp8_product.h"

namespace tessera::models::trace {

// The ranks of a group: along which axes, and how many.
struct Ranks {
  std::vector<mesh::Axis> axes;
  int64_t size = 1;
};
// Those that differ along these axes alone.
Ranks along(const mesh::DeviceMesh& mesh, const std::vector<mesh::Axis>& axes);

// Of attention: samples, tokens, heads, key/value heads, width of a head.
struct HeadShape {
  int64_t samples, q_tokens, kv_tokens, heads, kv_heads, width;
  bool drops = false;  // of its weights
  int64_t window = 0;  // of which it sees a part; 0: all
  int64_t behind = 0;  // so far the first query is behind the first key
  int64_t q_numel() const { return samples * q_tokens * heads * width; }
  int64_t kv_numel() const { return samples * kv_tokens * kv_heads * width; }
  int64_t lse_numel() const { return samples * q_tokens * heads; }
};

// Some of a sample's tokens: these, and on the rank that has most of them.
struct TokenPiece {
  int64_t samples, width, whole, here, most;
};

class Operators {
 public:
  Operators(Tape& tape, int64_t element, int64_t wide, int64_t threads)
      : tape_(tape), element_(element), wide_(wide), threads_(threads) {}

  Tape& tape() const { return tape_; }
  int64_t wide() const { return wide_; }
  int64_t element() const { return element_; }
  Memory elements(int64_t numel) const {
    return tape_.allocate(numel * element_);
  }
  Memory wides(int64_t numel) const { return tape_.allocate(numel * wide_); }
  Memory bytes(int64_t count) const { return tape_.allocate(count); }
  Memory numbers(int64_t count) const { return bytes(8 * count); }  // of int64
  // The same of tensors in the wide type.
  Operators widened() const { return {tape_, wide_, wide_, threads_}; }

  // x: (rows, in), where `in` may be 0: a shard without features.
  Traced linear(const Traced& x, int64_t rows, int64_t in, int64_t out,
                bool bias,
                nn::ProductType type = nn::ProductType::kSame) const {
    return linears(x, rows, in, {out}, bias, type).front();
  }
  // What a product holds while it runs; `adds_gradient`: added to that of a
  // weight.
  void multiply(int64_t rows, int64_t in, int64_t out,
                bool adds_gradient = false) const;
  // Micro-batches whose gradients of such a weight are one product.
  int64_t batches_together(int64_t rows, int64_t in, int64_t out) const;
  // A weight's gradient is added to, or its rows wait for those of others.
  void add_gradient(int64_t rows, int64_t in, int64_t out,
                    int64_t together) const;
  // Several of one input.
  std::vector<Traced> linears(const Traced& x, int64_t rows, int64_t in,
                              const std::vector<int64_t>& outs, bool bias,
                              nn::ProductType type) const;
  // nn's fp8_rows(), and what its product with (out, in) holds.
  Memory fp8_rows(int64_t rows, int64_t width) const;
  void multiply_fp8(int64_t rows, int64_t in, int64_t out) const;
  // One product for each of the experts, of all rows together.
  Traced grouped_linear(const Traced& x, int64_t rows, int64_t in, int64_t out,
                        int64_t experts) const;
  // With a bias that is added to what ranks summed up.
  Traced add_bias(const Traced& x, int64_t width) const;
  Traced add(const Traced& x, const Traced& y) const;
  // The same where y is.
  Traced add_to(const Traced& x, const Traced& y) const;
  // A number times x; `in_place`: where x is.
  Traced scaled(const Traced& x, bool in_place) const;
  // x + number * y.
  Traced add_scaled(const Traced& x, const Traced& y) const;
  Traced rms_norm(const Traced& x, int64_t width) const;
  // x itself and its norm.
  std::pair<Traced, Traced> rms_norm_branch(const Traced& x,
                                            int64_t width) const;
  Traced layer_norm(const Traced& x, int64_t width) const;
  Traced gelu(const Traced& x) const;
  // What a gate is made, times up.
  Traced glu(const Traced& gate, const Traced& up) const;
  // `kept`: cosines and sines of this call alone. `in_place`: where x is.
  Traced rotate(const Traced& x, const Memory& kept, bool in_place) const;
  // A copy in another order; `copied_back`: the gradient too.
  Traced reorder(const Traced& x, bool copied_back) const;
  // Rows by number, which are kept; `rows` of so many elements each.
  Traced index_select(const Traced& x, int64_t numel,
                      const Memory& index) const;
  // Rows of a table of so many elements.
  Traced embedding(const Memory& index, int64_t numel,
                   int64_t table_numel) const;
  Traced masked_fill(const Traced& x, const Memory& mask) const;

  // Collectives that autograd follows, as comm/autograd.h names them.
  Traced identity_with_all_reduce(const Traced& x, const Ranks& ranks) const;
  Traced all_reduce_with_identity(const Traced& x, const Ranks& ranks) const;
  Traced all_gather_with_reduce_scatter(const Traced& x,
                                        const Ranks& ranks) const;
  Traced reduce_scatter_with_all_gather(const Traced& x,
                                        const Ranks& ranks) const;
  // Of pieces of a sample's tokens, of so many samples of `width` elements a
  // token.
  Traced split_with_all_gather(const Traced& x, const TokenPiece& piece,
                               const Ranks& ranks) const;
  Traced all_gather_with_split(const Traced& x, const TokenPiece& piece,
                               const Ranks& ranks) const;
  // `copied_back`: the gradient comes in an order that cannot be sent.
  Traced all_to_all(const Traced& x, int64_t numel, const Ranks& ranks,
                    bool copied_back) const;
  // Of one that goes on, the rows that come; until it is awaited also `sent`.
  struct Travelling {
    Traced rows;
    Memory sent;
    std::shared_ptr<Memory> came_back;  // in backward
    int64_t from = 0;
  };
  Travelling start_all_to_all(const Traced& x, int64_t numel,
                              const Ranks& ranks) const;
  Traced finish_all_to_all(const Travelling& travelling,
                           const Ranks& ranks) const;
  // Copies of parts of x, of so many elements; and of whole ones out of parts.
  std::vector<Traced> parted(const Traced& x,
                             const std::vector<int64_t>& numels) const;
  Traced put_together(const std::vector<Traced>& parts) const;

  // The flash kernels, LibTorch's and nn's: (output, logsumexp), and gradients
  // of q, k and v.
  std::vector<Memory> flash(const HeadShape& shape) const;
  std::vector<Memory> flash_backward(const HeadShape& shape) const;
  std::vector<Memory> own_flash(const HeadShape& shape) const;
  std::vector<Memory> own_flash_backward(const HeadShape& shape) const;
  // nn::composed_attention, and its backward.
  std::vector<Memory> composed(const HeadShape& shape) const;
  std::vector<Memory> composed_backward(const HeadShape& shape) const;
  // LibTorch's with a mask, and where its kernel of blocks takes none by
  // products of whole scores.
  Traced masked_attention(const Traced& q, const Traced& k, const Traced& v,
                          const HeadShape& shape) const;
  Traced score_attention(const Traced& q, const Traced& k, const Traced& v,
                         const HeadShape& shape) const;
  // nn::causal_attention; `documents`: one in each sample.
  Traced attention(const Traced& q, const Traced& k, const Traced& v,
                   const HeadShape& shape, bool documents) const;
  // nn::piece_attention of these pairs of pieces.
  Traced piece_attention(const Traced& q, const Traced& k, const Traced& v,
                         const std::vector<HeadShape>& pairs) const;
  // A sum as an element; of the same type it is handed on as it is.
  Memory narrowed(const Memory& sum, int64_t numel) const;
  // What nn::attend does with a pair, behind which nothing of it is left.
  void attend(const HeadShape& pair, bool merges) const;
  void attend_backward(const HeadShape& pair) const;

 private:
  // Pairs of pieces, wherever nn has no loops for them.
  bool is_composed() const { return tape_.device() != at::kCPU; }
  // Of x and the weight of an RMSNorm.
  std::vector<Memory> norm_gradients(int64_t rows, int64_t width) const;
  Memory all_reduced(int64_t numel, const Ranks& ranks) const;
  Memory gathered(int64_t numel, const Ranks& ranks) const;
  Memory scattered(int64_t numel, const Ranks& ranks) const;
  Memory split(const Memory& whole, const TokenPiece& piece) const;
  Memory joined(const TokenPiece& piece, const Ranks& ranks) const;

  Tape& tape_;
  const int64_t element_, wide_, threads_;
};

}  // namespace tessera::models::trace
