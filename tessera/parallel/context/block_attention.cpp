#include "tessera/parallel/context/block_attention.h"

#include <ATen/ATen.h>

#include "tessera/nn/wide_type.h"

namespace tessera::parallel::context {
namespace {

// Piece i of (B, n S, H, E), as (B, H, S, E).
at::Tensor piece_of(const at::Tensor& x, const Pieces& pieces, size_t i) {
  const int64_t length = x.size(1) / static_cast<int64_t>(pieces.size());
  return x.narrow(1, static_cast<int64_t>(i) * length, length).transpose(1, 2);
}

// The same of (B, H, n S).
at::Tensor lse_of(const at::Tensor& lse, const Pieces& pieces, size_t i) {
  const int64_t length = lse.size(2) / static_cast<int64_t>(pieces.size());
  return lse.narrow(2, static_cast<int64_t>(i) * length, length);
}

// Calls pair(i, j, is_causal) for every piece of keys that a piece of queries
// sees.
template <typename Pair>
void for_each_pair(const Pieces& q_pieces, const Pieces& k_pieces, Pair pair) {
  for (size_t i = 0; i < q_pieces.size(); ++i) {
    for (size_t j = 0; j < k_pieces.size(); ++j) {
      if (k_pieces[j] > q_pieces[i]) continue;
      pair(i, j, k_pieces[j] == q_pieces[i]);
    }
  }
}

}  // namespace

void attend(const at::Tensor& q, const Pieces& q_pieces, const at::Tensor& k,
            const at::Tensor& v, const Pieces& k_pieces, Seen& seen) {
  if (!seen.out.defined()) {
    const auto options = q.options().dtype(nn::wide_type(q));
    seen.out = at::zeros(q.sizes(), options);
    seen.lse = at::full({q.size(0), q.size(2), q.size(1)}, -INFINITY, options);
  }
  for_each_pair(q_pieces, k_pieces, [&](size_t i, size_t j, bool is_causal) {
    const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
        piece_of(q, q_pieces, i), piece_of(k, k_pieces, j),
        piece_of(v, k_pieces, j), /*dropout_p=*/0.0, is_causal);
    const at::Tensor all_out = piece_of(seen.out, q_pieces, i);
    const at::Tensor all_lse = lse_of(seen.lse, q_pieces, i);
    const at::Tensor merged = at::logaddexp(all_lse, lse);
    all_out.mul_((all_lse - merged).exp_().unsqueeze(-1));
    all_out.add_(out * (lse - merged).exp_().unsqueeze(-1));
    all_lse.copy_(merged);
  });
}

void attend_backward(const at::Tensor& gradient, const at::Tensor& q,
                     const Pieces& q_pieces, const at::Tensor& k,
                     const at::Tensor& v, const Pieces& k_pieces,
                     const at::Tensor& out, const at::Tensor& lse,
                     AttentionGradients& sums) {
  for_each_pair(q_pieces, k_pieces, [&](size_t i, size_t j, bool is_causal) {
    const auto [dq, dk, dv] =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(
            piece_of(gradient, q_pieces, i), piece_of(q, q_pieces, i),
            piece_of(k, k_pieces, j), piece_of(v, k_pieces, j),
            piece_of(out, q_pieces, i), lse_of(lse, q_pieces, i),
            /*dropout_p=*/0.0, is_causal);
    piece_of(sums.dq, q_pieces, i).add_(dq);
    piece_of(sums.dk, k_pieces, j).add_(dk);
    piece_of(sums.dv, k_pieces, j).add_(dv);
  });
}

}  // namespace tessera::parallel::context
