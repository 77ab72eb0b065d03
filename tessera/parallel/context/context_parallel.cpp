#include "tessera/parallel/context/context_parallel.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "tessera/comm/autograd.h"
#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::parallel::context {
namespace {

at::Tensor on_device_of(const at::Tensor& x,
                        const std::vector<int64_t>& places) {
  return sent_to(at::tensor(places, at::kLong), x.device());
}

// (B, T/c, H, E) -> (B, T, H/c, E): all tokens, in their order, of this rank's
// heads.
at::Tensor heads_here(const at::Tensor& x, comm::Group& group) {
  const int64_t c = group.size(), samples = x.size(0), heads = x.size(2) / c;
  const int64_t length = x.size(1) / 2, width = x.size(3);
  const at::Tensor by_rank = x.reshape({samples, 2 * length, c, heads, width})
                                 .permute({2, 0, 1, 3, 4});
  // From each rank its two pieces.
  const at::Tensor pieces =
      comm::all_to_all(by_rank.contiguous(), group)
          .view({c, samples, 2, length, heads, width})
          .permute({1, 0, 2, 3, 4, 5})
          .reshape({samples, 2 * c, length, heads, width});
  std::vector<int64_t> place(2 * c);  // of each piece of the sequence
  for (int64_t rank = 0; rank < c; ++rank) {
    const Pieces theirs = pieces_of(rank, c);
    place[theirs[0]] = 2 * rank;
    place[theirs[1]] = 2 * rank + 1;
  }
  return pieces.index_select(1, on_device_of(x, place))
      .reshape({samples, 2 * c * length, heads, width});
}

// And back.
at::Tensor tokens_here(const at::Tensor& x, comm::Group& group) {
  const int64_t c = group.size(), samples = x.size(0), heads = x.size(2);
  const int64_t length = x.size(1) / (2 * c), width = x.size(3);
  const at::Tensor by_rank =
      x.reshape({samples, 2 * c, length, heads, width})
          .index_select(1, on_device_of(x, pieces_of_all(c)))
          .reshape({samples, c, 2 * length, heads, width})
          .transpose(0, 1);
  return comm::all_to_all(by_rank.contiguous(), group)
      .permute({1, 2, 0, 3, 4})
      .reshape({samples, 2 * length, c * heads, width});
}

}  // namespace

Pieces pieces_of(int64_t rank, int64_t degree) {
  return {rank, 2 * degree - 1 - rank};
}

Pieces pieces_of_all(int64_t degree) {
  Pieces all;
  for (int64_t rank = 0; rank < degree; ++rank) {
    for (int64_t piece : pieces_of(rank, degree)) all.push_back(piece);
  }
  return all;
}

int64_t local_length(int64_t tokens, const mesh::DeviceMesh& mesh) {
  return tokens / mesh.degree(mesh::Axis::kCp);
}

at::Tensor local_tokens(const at::Tensor& tokens, int64_t rank,
                        int64_t degree) {
  if (degree == 1) return tokens;
  const int64_t length = tokens.size(1) / (2 * degree);
  std::vector<at::Tensor> pieces;
  for (int64_t piece : pieces_of(rank, degree)) {
    pieces.push_back(tokens.narrow(1, piece * length, length));
  }
  return at::cat(pieces, 1);
}

at::Tensor ulysses_attention(const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& v, const nn::Sight& sight,
                             comm::Group& group) {
  const int64_t repeats = std::max<int64_t>(1, group.size() / k.size(2));
  const auto of_kv = [&](const at::Tensor& x) {
    return heads_here(
        repeats == 1 ? x : x.repeat_interleave(repeats, /*dim=*/2), group);
  };
  const at::Tensor wide_q = heads_here(q, group);
  const at::Tensor wide_k = of_kv(k), wide_v = of_kv(v);
  nn::Sight here = sight;
  here.dropout.first_head += group.rank() * wide_q.size(2);
  return tokens_here(nn::causal_attention(wide_q, wide_k, wide_v, here), group);
}

void check(const models::ModelConfig& model, int64_t seq_len,
           const mesh::DeviceMesh& mesh, const ContextConfig& config) {
  const int64_t cp = mesh.degree(mesh::Axis::kCp);
  const int64_t tp = mesh.degree(mesh::Axis::kTp);
  if (cp == 1) return;
  const int64_t heads = model.heads / tp;
  const int64_t kv_heads = std::max<int64_t>(1, model.kv_heads / tp);
  const auto cuts_evenly = [&](int64_t n) {
    return n == 1 || seq_len % (2 * n) == 0;
  };
  const auto has_heads = [&](int64_t n) {
    return config.method != "ulysses" ||
           (heads % n == 0 && (kv_heads % n == 0 || n % kv_heads == 0));
  };
  const auto nearest = [&] {
    return nearest_fitting(
        cp, std::max<int64_t>(1, seq_len / 2),
        [&](int64_t n) { return cuts_evenly(n) && has_heads(n); });
  };
  TS_CHECK_CONFIG(
      cuts_evenly(cp), "mesh.cp (", cp, ") cuts a sequence into ", 2 * cp,
      " pieces, which does not divide data.seq_len (", seq_len,
      "). Nearest mesh.cp: ", nearest(),
      "; nearest data.seq_len: ", nearest_multiples(seq_len, 2 * cp), ".");
  TS_CHECK_CONFIG(
      has_heads(cp),
      "context.method ulysses gives every rank of cp whole heads: mesh.cp (",
      cp, ") must divide model.heads / mesh.tp (", heads,
      ") and divide, or be divided by, model.kv_heads / mesh.tp (", kv_heads,
      "). Nearest mesh.cp: ", nearest(),
      "; nearest model.heads: ", nearest_multiples(model.heads, cp * tp),
      "; or use context.method ring.");
}

void check_generation(const mesh::Degrees& mesh) {
  TS_CHECK_CONFIG(mesh.cp == 1, "mesh.cp is ", mesh.cp,
                  ", but generate adds one token at a time, which nothing can "
                  "cut. Nearest mesh.cp: 1; mesh.tp and mesh.pp share out a "
                  "model.");
}

void place(models::Model& model) {
  for (const auto& parameter : nn::parameters_of(model)) {
    mesh::Layout& layout = parameter.spec->layout;
    if (layout.is_of_expert()) continue;  // they have a view of their own
    layout = layout.with(mesh::Axis::kCp, mesh::Placement::replicate_summed());
  }
}

void apply(models::Model& model, const ContextConfig& config,
           comm::Group& group) {
  model.set_pieces(pieces_of(group.rank(), group.size()));
  const auto attention = config.method == "ulysses"     ? ulysses_attention
                         : config.method == "allgather" ? gathered_attention
                                                        : ring_attention;
  comm::Group* ranks = &group;
  model.set_attention(
      [attention, ranks](const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const nn::Sight& sight) {
        return attention(q, k, v, sight, *ranks);
      });
}

}  // namespace tessera::parallel::context
