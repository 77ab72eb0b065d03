// Rotary position embedding, half-rotation layout (Hugging Face's, not Meta's
// interleaved one): x = (x1, x2) by halves of the head, rotated to
// (x1 cos - x2 sin, x2 cos + x1 sin), angle = position * theta^(-2i/E).
//
// Shapes: x: (B, T, H, E), E even; cos, sin: (T, E/2).
// Types:  angles are computed in fp64, rotations in fp32 or wider.
// Source: Su et al., RoFormer, arXiv 2104.09864.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::nn {

struct Rotation {
  at::Tensor cos;  // (T, E/2)
  at::Tensor sin;
  explicit operator bool() const { return cos.defined(); }
};

// Keeps the angles of as many positions as were asked for so far.
class RotaryTable {
 public:
  RotaryTable() = default;
  RotaryTable(int64_t head_dim, double theta)
      : head_dim_(head_dim), theta_(theta) {}
  // Positions [begin, begin + length), on the device of `like` and in the type
  // that rotates tensors of its type.
  Rotation rows(int64_t begin, int64_t length, const at::Tensor& like);

 private:
  void grow(int64_t positions, const at::TensorOptions& options);

  int64_t head_dim_ = 0;
  double theta_ = 0.0;
  Rotation all_;
};

// Differentiable in x; backward is the rotation by the opposite angle.
at::Tensor rotate(const at::Tensor& x, const Rotation& rotation);

}  // namespace tessera::nn
