// The blocks that a decoder is made of.
//
// Shapes: B samples, T tokens of each, D model width, F width of the MLP, H
//         query heads, K key/value heads (K divides H), E width of a head, V
//         vocabulary. Weights are (out, in), as torch::nn::Linear has them.
// Types:  fp64, fp32, bf16, fp16. Norms and rotations compute in fp32 or more.
// Comm:   none of its own. A strategy may give a parameter another layout and
//         hand in what then has to happen to the activations (Transform); a
//         block uses the sizes it finds.
// Threads: a block belongs to one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/fp8_product.h"
#include "tessera/nn/parameter.h"

namespace tessera::nn {

// What a strategy does to activations at a place in a block: a collective that
// autograd follows.
using Transform = std::function<at::Tensor(const at::Tensor&)>;

// A part of a block in which ranks compute parts of the same sums: what happens
// to the activations where they enter it and where they leave it.
struct Region {
  Transform enter;
  Transform leave;
  int64_t ranks = 1;
  int64_t rank = 0;  // which of them this one is
};

// A module without parameters of its own, for its name.
class Room : public torch::nn::Module {};

struct LinearOptions {
  int64_t in = 0;
  int64_t out = 0;
  bool bias = false;
  double init_std = 0.02;
  Role role = {};  // of the weight; a bias is what that makes of it
};

// y = x W^T + b. x: (..., in), y: (..., out). With an adapter, of low rank r,
// y = x W^T + b + scale (x A^T) B^T (Hu et al. 2021, arXiv 2106.09685).
class Linear : public Block {
 public:
  explicit Linear(const LinearOptions& options);
  at::Tensor forward(const at::Tensor& x) const;
  const at::Tensor& weight() const { return weight_; }
  const LinearOptions& options() const { return options_; }
  // Parameters lora_A (r, in) and lora_B (out, r), which is zero at first.
  void add_adapter(int64_t rank, double scale);
  bool has_adapter() const { return lora_a_.defined(); }
  // The ranks hold parts of `in`, each computes a part of the sum x W^T:
  // `reduce` makes it whole. The bias is added after it, once.
  void set_reduction(Transform reduce) { reduce_ = std::move(reduce); }
  // Of x and the weight; an adapter's stay as they are.
  void set_products(ProductType type) { products_ = type; }

 private:
  at::Tensor product(const at::Tensor& x, const at::Tensor& bias) const;

  LinearOptions options_;
  at::Tensor weight_;           // (out, in)
  at::Tensor bias_;             // (out), or undefined
  at::Tensor lora_a_, lora_b_;  // of an adapter, or undefined
  double scale_ = 0.0;
  Transform reduce_;
  ProductType products_ = ProductType::kSame;

  friend std::vector<at::Tensor> forward_all(
      const at::Tensor& x, const std::vector<const Linear*>& layers);
};

// What each of them makes of x, whose gradient is one sum.
std::vector<at::Tensor> forward_all(const at::Tensor& x,
                                    const std::vector<const Linear*>& layers);

// ids: (B, T) of int64 -> (B, T, D).
class Embedding : public Block {
 public:
  Embedding(int64_t rows, int64_t width, double init_std, Role role = {});
  at::Tensor forward(const at::Tensor& ids) const;
  const at::Tensor& weight() const { return weight_; }
  // This rank holds the rows from `first_row` on; ids of other rows give zeros
  // here, and `reduce` adds up what the ranks found.
  void set_rows(int64_t first_row, Transform reduce);

 private:
  at::Tensor weight_;  // (rows, D)
  int64_t first_row_ = 0;
  Transform reduce_;
};

enum class NormKind {
  kLayerNorm,
  kRmsNorm,
  kRmsNormPlusOne,  // by 1 + weight, which begins at zero: Gemma's
};

// Over the last dim. LayerNorm has a bias, RMSNorm none.
class Norm : public Block {
 public:
  Norm(NormKind kind, int64_t width, double eps, Role role = {});
  at::Tensor forward(const at::Tensor& x) const;
  // x, for what is added to it, and its norm: of an RMSNorm the gradients of
  // both are summed in one pass.
  std::pair<at::Tensor, at::Tensor> branch(const at::Tensor& x) const;
  // Of an RMSNorm the ranks of the region hold equal parts of the width each.
  void set_region(const Region& region);

 private:
  double offset() const { return kind_ == NormKind::kRmsNormPlusOne ? 1 : 0; }

  NormKind kind_;
  double eps_;
  at::Tensor weight_;
  at::Tensor bias_;
  Transform mean_;  // over the ranks, of what each has of the same rows
};

enum class MlpKind {
  kGelu,    // down(gelu_tanh(up(x)))             GPT-2's gelu_new
  kSwiGlu,  // down(silu(gate(x)) * up(x))        arXiv 2002.05202
  kGeGlu,   // down(gelu_tanh(gate(x)) * up(x))   the same
};
inline bool has_gate(MlpKind kind) { return kind != MlpKind::kGelu; }

struct MlpOptions {
  MlpKind kind = MlpKind::kSwiGlu;
  int64_t width = 0;   // D
  int64_t hidden = 0;  // F
  bool bias = false;
  double init_std = 0.02;
  double out_init_std = 0.02;  // of `down`, which writes to the residual stream
};

// What `down` reads: of `up`, and where there is one of `gate`.
at::Tensor activated(MlpKind kind, const at::Tensor& gate,
                     const at::Tensor& up);

// x: (B, T, D) -> (B, T, D).
class Mlp : public Block {
 public:
  explicit Mlp(const MlpOptions& options);
  at::Tensor forward(const at::Tensor& x) const;

  // The ranks hold a part of F each.
  void set_region(const Region& region);

 private:
  MlpKind kind_;
  Transform enter_;
  std::shared_ptr<Linear> gate_;  // where the kind has one
  std::shared_ptr<Linear> up_;
  std::shared_ptr<Linear> down_;
};

}  // namespace tessera::nn
