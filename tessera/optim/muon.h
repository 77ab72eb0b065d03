// Muon: momentum whose matrices are brought near to orthogonal ones.
//
//   b <- momentum b + (1 - momentum) g     u = g + momentum (b - g), or b
//   o = X_k of X_0 = u / max(|u|, eps),
//       X <- a X + (b A + c A^2) X, A = X X^T, for (a, b, c) of Keller Jordan
//   p <- p - lr weight_decay p             p <- p - lr s o
//
// with s = sqrt(max(1, m / n)) or 0.2 sqrt(max(m, n)) of a matrix (m, n), as
// torch.optim.Muon computes it. Of hidden matrices; all else is AdamW's.
// Shapes:  (m, n), or (experts, m, n), each of which is a matrix by itself.
// Whole:   o is of the whole matrix: who has a piece gathers u's pieces.
// State:   "momentum.<parameter>" (b).
// Memory:  2 m n + min(m, n)^2 elements inside of an orthogonalisation.
// Source:  Keller Jordan et al. 2024, kellerjordan.github.io/posts/muon; 0.2
//          sqrt(max(m, n)): Liu et al. 2025, arXiv 2502.16982.
#pragma once

#include "tessera/optim/registry.h"

namespace tessera::optim {

// The step's u of a group of one parameter, in the type of the matrix products.
at::Tensor muon_piece(const OptimizerConfig& config, const UpdateGroup& group);
// o and s of the whole u, whose memory is taken.
Direction muon_direction(const OptimizerConfig& config, at::Tensor whole);
// By the group's directions.
void muon(const OptimizerConfig& config, const UpdateGroup& group);

}  // namespace tessera::optim
