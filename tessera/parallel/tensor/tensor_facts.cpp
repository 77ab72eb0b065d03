#include "tessera/parallel/tensor/tensor_facts.h"

#include <algorithm>

#include "tessera/mesh/layout.h"

namespace tessera::parallel::tensor {
namespace {

using mesh::Axis;
using models::trace::LossShape;
using models::trace::Memory;
using models::trace::Operators;
using models::trace::Ranks;
using models::trace::Traced;

// vocabulary_loss: of the maxima, and of the sums with the targets' logits.
void loss(const Operators& ops, const LossShape& shape, const Ranks& ranks) {
  const auto all_reduce = [&](int64_t numel) {
    ops.tape().collective("all_reduce", ranks.axes, numel * ops.wide());
  };
  const int64_t block = shape.chunk * shape.columns;
  const Memory own = ops.numbers(shape.rows), is_own = ops.bytes(shape.rows);
  const Memory max = ops.wides(shape.rows);
  all_reduce(shape.rows);
  const Memory parts = ops.wides(2 * shape.rows);
  {
    const Memory z = ops.wides(block);
    const Memory picked = ops.wides(shape.chunk), exp = ops.wides(block);
  }
  all_reduce(2 * shape.rows);
}

}  // namespace

models::trace::Region traced_region(const mesh::DeviceMesh& mesh,
                                    const TensorConfig& config) {
  const Ranks tp = models::trace::along(mesh, {Axis::kTp});
  if (!config.sequence_parallel) {
    return {.enter =
                [tp](const Operators& ops, const Traced& x) {
                  return ops.identity_with_all_reduce(x, tp);
                },
            .leave =
                [tp](const Operators& ops, const Traced& x) {
                  return ops.all_reduce_with_identity(x, tp);
                }};
  }
  return {.enter =
              [tp](const Operators& ops, const Traced& x) {
                return ops.all_gather_with_reduce_scatter(x, tp);
              },
          .leave =
              [tp](const Operators& ops, const Traced& x) {
                return ops.reduce_scatter_with_all_gather(x, tp);
              }};
}

void apply(models::trace::TracedModel& model, const mesh::DeviceMesh& mesh,
           const mesh::Coord& coord, const TensorConfig& config) {
  const int64_t tp = mesh.degree(Axis::kTp), at = coord[Axis::kTp];
  model.heads /= tp;
  model.kv_heads = std::max<int64_t>(1, model.kv_heads / tp);
  model.ffn = mesh::chunk_of(model.ffn, tp, at).size();
  model.shared_ffn = mesh::chunk_of(model.shared_ffn, tp, at).size();
  model.most_vocab = mesh::chunk_of(model.vocab, tp, 0).size();
  model.vocab = mesh::chunk_of(model.vocab, tp, at).size();
  model.region = traced_region(mesh, config);
  model.loss = [ranks = models::trace::along(mesh, {Axis::kTp})](
                   const Operators& ops, const LossShape& shape) {
    loss(ops, shape, ranks);
  };
  if (config.sequence_parallel) model.sequence_shards = tp;
}

}  // namespace tessera::parallel::tensor
