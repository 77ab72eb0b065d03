// The global L2 norm of gradients, and what they are multiplied by for it.
//
//   at::Tensor sum = sum_of_squares(owned_gradients);  // this rank's elements
//   ... sum over ranks, each element counted once; the host reads it ...
//   optimizer.begin_step(scaling.of(norm));
//
// Device:  the sum stays on the gradients' device. The scale is the host's, who
//          knows the norm before anything is updated; or stays there too, for
//          updates that heed it there (Optimizer::reads_there).
// Order:   squares are summed in double, tensor by tensor, in an order that
//          depends on the sizes alone, not on the number of threads.
// Comm:    none: the sum over ranks is the caller's.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::optim {

// 0-dim, of fp64. REQUIRES: gradients on one device; of none, it is the CPU's.
at::Tensor sum_of_squares(const std::vector<at::Tensor>& gradients);

// clip_norm / (norm + 1e-6) where that is below 1, else 1. clip_norm 0: no
// clipping. NaN gives 1: a norm that is not finite is the caller's to report.
double clip_scale(double norm, double clip_norm);

// The same of `squares`, (1) of fp64: of a norm that is their root times
// `factor`. No number where that is not finite.
at::Tensor clip_scale_there(const at::Tensor& squares, double factor,
                            double clip_norm);

// 1 / (norm + 1e-6), which brings the norm to 1; for a clip_norm below 1 times
// what clips that. One of 1 or more has nothing left to do.
double normalize_scale(double norm, double clip_norm);

// What an optimizer asks for.
struct GradientScaling {
  double clip_norm = 0;
  bool normalizes = false;
  double of(double norm) const {
    return normalizes ? normalize_scale(norm, clip_norm)
                      : clip_scale(norm, clip_norm);
  }
};

// In place; scale 1 touches nothing.
void scale_gradients(const std::vector<at::Tensor>& gradients, double scale);

}  // namespace tessera::optim
