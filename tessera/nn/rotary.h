// Rotary position embedding, half-rotation layout (Hugging Face's, not Meta's
// interleaved one): x = (x1, x2) by halves of the head, rotated to
// (x1 cos - x2 sin, x2 cos + x1 sin), angle = position * theta^(-2i/E).
//
// Shapes: x: (B, T, H, E), E even; cos, sin: (T, E/2).
// Types:  angles are computed in fp64, rotations in fp32 or wider.
// Source: Su et al., RoFormer, arXiv 2104.09864. Scaled for longer sequences:
//         Grattafiori et al. 2024, arXiv 2407.21783 (Llama 3.1); Peng et al.
//         2023, arXiv 2309.00071 (YaRN), eqs. 17 to 22.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::nn {

struct Rotation {
  at::Tensor cos;  // (T, E/2)
  at::Tensor sin;
  explicit operator bool() const { return cos.defined(); }
};

// Frequencies of a model that was trained on shorter sequences, of
// `original_length`.
struct RopeScaling {
  enum class Kind { kNone, kLinear, kLlama3, kYarn };
  Kind kind = Kind::kNone;
  double factor = 1;  // by which sequences are longer
  int64_t original_length = 0;
  double low_freq_factor = 1, high_freq_factor = 4;  // of kLlama3
  double beta_fast = 32, beta_slow = 1;              // of kYarn, in rotations
  bool truncate = true;                              // of kYarn: whole dims
  double attention_factor = 1;  // by which cosines and sines are multiplied
};

// theta^(-2i/dim), scaled: (dim / 2) of fp64.
at::Tensor rotary_frequencies(int64_t dim, double theta,
                              const RopeScaling& scaling);

// Keeps the angles of as many positions as were asked for so far, and of up to
// twice as many where they are asked for one by one.
class RotaryTable {
 public:
  RotaryTable() = default;
  RotaryTable(int64_t dim, double theta, const RopeScaling& scaling = {})
      : dim_(dim), theta_(theta), scaling_(scaling) {}
  // Positions [begin, begin + length), on the device of `like` and in the type
  // that rotates tensors of its type.
  Rotation rows(int64_t begin, int64_t length, const at::Tensor& like);

 private:
  void grow(int64_t positions, const at::TensorOptions& options);

  int64_t dim_ = 0;
  double theta_ = 0.0;
  RopeScaling scaling_;
  Rotation all_;
};

// Differentiable in x, as often as one likes; backward is the rotation by the
// opposite angle, in place where nobody else has the gradient. TS_CHECK on
// angles of other positions, or of another type than rows() gives them for x.
at::Tensor rotate(const at::Tensor& x, const Rotation& rotation);
// The same, in x's memory where it is contiguous. REQUIRES: nobody else uses x,
// nor what x is a view of: autograd does not see it change.
at::Tensor rotate_in_place(const at::Tensor& x, const Rotation& rotation);

}  // namespace tessera::nn
