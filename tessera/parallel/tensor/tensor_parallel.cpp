#include "tessera/parallel/tensor/tensor_parallel.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>

#include "tessera/comm/autograd.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/parallel/tensor/vocabulary_loss.h"

namespace tessera::parallel::tensor {
namespace {

using mesh::Axis;
using mesh::Placement;

constexpr int64_t kSequenceDim = 1;  // of (B, T, D)

// REQUIRES: tp > 1.
void check_sequence(const models::ModelConfig& model, int64_t seq_len,
                    int64_t cp, int64_t tp,
                    const std::function<bool(int64_t)>& has_heads) {
  const std::string cut =
      cp == 1
          ? c10::str("mesh.tp (", tp, ") does not divide")
          : c10::str("mesh.cp (", cp, ") x mesh.tp (", tp, ") does not divide");
  const std::string nearest = nearest_fitting(tp, model.heads, [&](int64_t n) {
    return n > 1 && has_heads(n) && cuts_evenly(seq_len, cp, n);
  });
  // Context parallelism cuts into 2 cp pieces.
  const int64_t multiple = cp == 1 ? tp : cp * std::lcm<int64_t>(2, tp);
  TS_CHECK_CONFIG(cuts_evenly(seq_len, cp, tp), cut, " data.seq_len (", seq_len,
                  "), which tensor.sequence_parallel cuts. Nearest "
                  "data.seq_len: ",
                  nearest_multiples(seq_len, multiple),
                  nearest.empty() ? "" : "; nearest mesh.tp: ", nearest, ".");
}

// Where the ranks of tp have a parameter of this role.
Placement placement_of(const nn::Role& role, int64_t tp, bool sequence) {
  using Kind = nn::Role::Kind;
  switch (role.kind) {
    case Kind::kColumn: {
      const int64_t heads = role.heads > 0 ? role.heads : tp;
      return Placement::shard(0, std::max<int64_t>(1, tp / heads));
    }
    case Kind::kRow:
      return Placement::shard(1);
    case Kind::kVocabulary:
      return Placement::shard(0);
    case Kind::kPerHead:
    case Kind::kInParts:
      return Placement::replicate_summed();
    case Kind::kWhole:
      // On all tokens alike, or with sequence parallelism on a rank's own.
      return sequence ? Placement::replicate_summed() : Placement::replicate();
    case Kind::kRouter:
      return Placement::replicate();  // expert parallelism says more
  }
  TORCH_INTERNAL_ASSERT(false, "no role ", static_cast<int>(role.kind));
}

}  // namespace

bool cuts_evenly(int64_t seq_len, int64_t cp, int64_t tp) {
  return seq_len % (cp * tp) == 0;
}

void check(const models::ModelConfig& model, int64_t seq_len,
           const mesh::DeviceMesh& mesh, const TensorConfig& config) {
  const int64_t tp = mesh.degree(Axis::kTp);
  TS_CHECK_CONFIG(
      !config.sequence_parallel || tp > 1,
      "tensor.sequence_parallel is true, but mesh.tp is 1: there is "
      "nothing to cut the sequence over. Set mesh.tp to 2 or more, "
      "or leave tensor.sequence_parallel out.");
  if (tp == 1) return;
  const auto shares_kv = [&](int64_t n) {
    return model.kv_heads % n == 0 || n % model.kv_heads == 0;
  };
  const auto has_heads = [&](int64_t n) {
    return model.heads % n == 0 && shares_kv(n);
  };
  const std::string nearest = nearest_fitting(tp, model.heads, has_heads);
  TS_CHECK_CONFIG(
      model.heads % tp == 0, "mesh.tp (", tp, ") does not divide model.heads (",
      model.heads,
      "): every rank computes whole heads. Nearest mesh.tp: ", nearest,
      "; nearest model.heads: ", nearest_multiples(model.heads, tp), ".");
  TS_CHECK_CONFIG(
      shares_kv(tp), "mesh.tp (", tp, ") and model.kv_heads (", model.kv_heads,
      "): one must divide the other, so that every rank has whole "
      "key/value heads. Nearest mesh.tp: ",
      nearest,
      "; nearest model.kv_heads: ", nearest_multiples(model.kv_heads, tp), ".");
  if (!config.sequence_parallel) return;
  check_sequence(model, seq_len, mesh.degree(Axis::kCp), tp, has_heads);
}

nn::Region region(const TensorConfig& config, comm::Group& ranks) {
  comm::Group* group = &ranks;
  if (!config.sequence_parallel) {
    return {.enter =
                [group](const at::Tensor& x) {
                  return comm::identity_with_all_reduce(x, *group);
                },
            .leave =
                [group](const at::Tensor& x) {
                  return comm::all_reduce_with_identity(x, *group);
                },
            .ranks = ranks.size(),
            .rank = ranks.rank()};
  }
  return {.enter =
              [group](const at::Tensor& x) {
                return comm::all_gather_with_reduce_scatter(x, kSequenceDim,
                                                            *group);
              },
          .leave =
              [group](const at::Tensor& x) {
                return comm::reduce_scatter_with_all_gather(x, kSequenceDim,
                                                            *group);
              },
          .ranks = ranks.size(),
          .rank = ranks.rank()};
}

void place(models::Model& model, const mesh::DeviceMesh& mesh,
           const TensorConfig& config) {
  for (const auto& parameter : nn::parameters_of(model)) {
    const auto& role = parameter.spec->role;
    if (role.of_experts) continue;  // they have a view of their own
    mesh::Layout& layout = parameter.spec->layout;
    layout = layout.with(Axis::kTp, placement_of(role, mesh.degree(Axis::kTp),
                                                 config.sequence_parallel));
  }
}

void apply(models::Model& model, const TensorConfig& config,
           comm::Group& group) {
  const int64_t tp = group.size();
  const nn::Region around = region(config, group);
  model.set_region(around);
  const int64_t entries = model.config().vocab;
  const int64_t first = mesh::chunk_of(entries, tp, group.rank()).begin;
  model.set_vocabulary({.first = first,
                        .most = mesh::chunk_of(entries, tp, 0).size(),
                        .region = around,
                        .loss = vocabulary_loss({first, entries, &group})});
  if (config.sequence_parallel) model.set_sequence_shard(group.rank(), tp);
}

}  // namespace tessera::parallel::tensor
