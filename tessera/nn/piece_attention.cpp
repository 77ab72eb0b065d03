#include "tessera/nn/piece_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <tuple>

#include "tessera/nn/composed_attention.h"
#include "tessera/nn/detail/second_derivatives.h"
#include "tessera/nn/flash_attention.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn {
namespace {

// A run of tokens that are here, of some samples.
struct Run {
  int64_t sample, samples;
  int64_t begin, length;
  int64_t position;  // in the sequence
};

// Of (B, n S, H, E), as (B', H, length, E).
at::Tensor run_of(const at::Tensor& x, const Run& run) {
  return x.narrow(0, run.sample, run.samples)
      .narrow(1, run.begin, run.length)
      .transpose(1, 2);
}

// The same of (B, H, n S).
at::Tensor lse_of(const at::Tensor& lse, const Run& run) {
  return lse.narrow(0, run.sample, run.samples)
      .narrow(2, run.begin, run.length);
}

struct Pair {
  Run queries, keys;
  bool is_causal;  // else every query sees every key
  int64_t window;  // of which it sees a part; 0: all
};

// Pieces of queries and of keys that are here, and which pairs of them meet.
class Meetings {
 public:
  Meetings(const at::Tensor& q, const Pieces& q_pieces, const Pieces& k_pieces,
           const Sight& sight)
      : samples_(q.size(0)),
        length_(q.size(1) / static_cast<int64_t>(q_pieces.size())),
        q_pieces_(q_pieces),
        k_pieces_(k_pieces),
        starts_(sight.document_starts),
        window_(sight.window) {}

  template <typename Visit>
  void for_each(Visit visit) const {
    for (size_t i = 0; i < q_pieces_.size(); ++i) {
      if (starts_.defined()) {
        for (int64_t b = 0; b < samples_; ++b) of_documents(i, b, visit);
        continue;
      }
      for (size_t j = 0; j < k_pieces_.size(); ++j) {
        if (k_pieces_[j] > q_pieces_[i]) continue;
        meet(whole(i, q_pieces_), whole(j, k_pieces_),
             k_pieces_[j] == q_pieces_[i], visit);
      }
    }
  }

 private:
  int64_t place_of(size_t i) const { return static_cast<int64_t>(i) * length_; }
  Run whole(size_t i, const Pieces& of) const {
    return {0, samples_, place_of(i), length_, of[i] * length_};
  }

  // The documents of sample b in piece i of the queries, one by one.
  template <typename Visit>
  void of_documents(size_t i, int64_t b, Visit visit) const {
    const int64_t* const starts = starts_[b].const_data_ptr<int64_t>();
    const int64_t first = q_pieces_[i] * length_, last = first + length_;
    for (int64_t begin = first, end = first; begin < last; begin = end) {
      const int64_t start = starts[begin];
      while (end < last && starts[end] == start) ++end;
      const Run queries{b, 1, place_of(i) + begin - first, end - begin, begin};
      for (size_t j = 0; j < k_pieces_.size(); ++j) {
        const int64_t k_first = k_pieces_[j] * length_;
        const bool is_own = k_first == first;
        const int64_t from = std::max(start, k_first);
        const int64_t to = is_own ? end : k_first + length_;
        if (k_first > first || from >= to) continue;
        meet(queries, {b, 1, place_of(j) + from - k_first, to - from, from},
             is_own, visit);
      }
    }
  }

  template <typename Visit>
  void meet(const Run& queries, const Run& keys, bool is_causal,
            Visit visit) const {
    const Within seen = within_window({queries.position, queries.length},
                                      {keys.position, keys.length}, window_);
    if (seen == Within::kNone) return;
    visit(Pair{queries, keys, is_causal, seen == Within::kPart ? window_ : 0});
  }

  int64_t samples_, length_;
  const Pieces &q_pieces_, &k_pieces_;
  const at::Tensor& starts_;
  const int64_t window_;
};

FlashRuns runs_of(const Pair& pair, const Dropout& dropout) {
  FlashRuns runs{pair.is_causal, dropout, pair.queries.position,
                 pair.keys.position, pair.window};
  runs.dropout.first_sample += pair.queries.sample;
  return runs;
}

bool is_of_libtorch(const FlashRuns& runs) {
  return !runs.dropout && runs.window == 0;
}

// All (B', H, length, E), as run_of() gives them: out and log-sum-exp.
std::tuple<at::Tensor, at::Tensor> attend_pair(const at::Tensor& q,
                                               const at::Tensor& k,
                                               const at::Tensor& v,
                                               const FlashRuns& runs) {
  if (!q.is_cpu()) return composed_attention(q, k, v, runs);
  if (is_of_libtorch(runs)) {
    return at::_scaled_dot_product_flash_attention_for_cpu(
        q, k, v, /*dropout_p=*/0.0, runs.is_causal);
  }
  const auto [out, lse] = flash_forward(q.transpose(1, 2), k.transpose(1, 2),
                                        v.transpose(1, 2), runs);
  return {out.transpose(1, 2), lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_pair_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
    const FlashRuns& runs) {
  if (!q.is_cpu()) {
    return composed_attention_backward(gradient, q, k, v, out, lse, runs);
  }
  if (is_of_libtorch(runs)) {
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, out, lse, /*dropout_p=*/0.0, runs.is_causal);
  }
  const auto [dq, dk, dv] = flash_backward(
      gradient.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2),
      v.transpose(1, 2), out.transpose(1, 2), lse, runs);
  return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
}

class PieceAttention : public torch::autograd::Function<PieceAttention> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const Pieces& q_pieces,
                            const Pieces& k_pieces, const Sight& sight) {
    Seen seen;
    attend(q, q_pieces, k, v, k_pieces, sight, seen);
    const at::Tensor out = seen.out.to(q.scalar_type());
    ctx->save_for_backward({q, k, v, sight.document_starts, out, seen.lse});
    ctx->saved_data["dropout"] = as_saved(sight.dropout);
    ctx->saved_data["window"] = sight.window;
    ctx->saved_data["q_pieces"] = q_pieces;
    ctx->saved_data["k_pieces"] = k_pieces;
    return out;
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      const torch::autograd::variable_list& gradients) {
    detail::refuse_second_derivatives("Attention by pieces");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const auto wide = q.options().dtype(wide_type(q));
    AttentionGradients sums{at::zeros(q.sizes(), wide),
                            at::zeros(k.sizes(), wide),
                            at::zeros(v.sizes(), wide)};
    attend_backward(gradients[0].contiguous(), q,
                    ctx->saved_data["q_pieces"].toIntVector(), k, v,
                    ctx->saved_data["k_pieces"].toIntVector(),
                    {saved[3], saved_dropout(ctx->saved_data["dropout"]),
                     ctx->saved_data["window"].toInt()},
                    saved[4], saved[5], sums);
    const auto type = q.scalar_type();
    return {sums.dq.to(type), sums.dk.to(type), sums.dv.to(type), {}, {}, {}};
  }
};

}  // namespace

Within within_window(const Stretch& queries, const Stretch& keys,
                     int64_t window) {
  if (window == 0) return Within::kAll;
  const int64_t last_query = queries.begin + queries.length - 1;
  const int64_t last_key = keys.begin + keys.length - 1;
  if (queries.begin - last_key >= window) return Within::kNone;
  return last_query - keys.begin < window ? Within::kAll : Within::kPart;
}

void attend(const at::Tensor& q, const Pieces& q_pieces, const at::Tensor& k,
            const at::Tensor& v, const Pieces& k_pieces, const Sight& sight,
            Seen& seen) {
  // Every query then meets one run of keys: there is nothing to merge.
  const bool is_all = !seen.out.defined() && k_pieces.size() == 1;
  if (!seen.out.defined()) {
    const auto options = q.options().dtype(wide_type(q));
    seen.out = at::zeros(q.sizes(), options);
    seen.lse = at::full({q.size(0), q.size(2), q.size(1)}, -INFINITY, options);
  }
  const Meetings meetings(q, q_pieces, k_pieces, sight);
  meetings.for_each([&](const Pair& pair) {
    const auto [out, lse] =
        attend_pair(run_of(q, pair.queries), run_of(k, pair.keys),
                    run_of(v, pair.keys), runs_of(pair, sight.dropout));
    const at::Tensor all_out = run_of(seen.out, pair.queries);
    const at::Tensor all_lse = lse_of(seen.lse, pair.queries);
    if (is_all) {
      all_out.copy_(out);
      all_lse.copy_(lse);
      return;
    }
    const at::Tensor merged = at::logaddexp(all_lse, lse);
    all_out.mul_((all_lse - merged).exp_().unsqueeze(-1));
    all_out.add_(out * (lse - merged).exp_().unsqueeze(-1));
    all_lse.copy_(merged);
  });
}

void attend_backward(const at::Tensor& gradient, const at::Tensor& q,
                     const Pieces& q_pieces, const at::Tensor& k,
                     const at::Tensor& v, const Pieces& k_pieces,
                     const Sight& sight, const at::Tensor& out,
                     const at::Tensor& lse, AttentionGradients& sums) {
  const Meetings meetings(q, q_pieces, k_pieces, sight);
  meetings.for_each([&](const Pair& pair) {
    const auto [dq, dk, dv] = attend_pair_backward(
        run_of(gradient, pair.queries), run_of(q, pair.queries),
        run_of(k, pair.keys), run_of(v, pair.keys), run_of(out, pair.queries),
        lse_of(lse, pair.queries), runs_of(pair, sight.dropout));
    run_of(sums.dq, pair.queries).add_(dq);
    run_of(sums.dk, pair.keys).add_(dk);
    run_of(sums.dv, pair.keys).add_(dv);
  });
}

at::Tensor piece_attention(const at::Tensor& q, const Pieces& q_pieces,
                           const at::Tensor& k, const at::Tensor& v,
                           const Pieces& k_pieces, const Sight& sight) {
  return PieceAttention::apply(q, k, v, q_pieces, k_pieces, sight);
}

}  // namespace tessera::nn
