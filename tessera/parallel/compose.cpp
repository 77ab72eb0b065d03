#include "tessera/parallel/compose.h"

#include <utility>
#include <vector>

namespace tessera::parallel {
namespace {

using mesh::Axis;

// A unit reads its own parameters; with tied embeddings the last one reads
// those of the first too.
std::vector<std::vector<int64_t>> reads_of(const models::Decoder& model) {
  std::vector<std::vector<int64_t>> reads;
  for (int64_t unit = 0; unit < model.num_units(); ++unit) {
    reads.push_back({unit});
  }
  if (model.config().tie_embeddings) reads.back().push_back(0);
  return reads;
}

}  // namespace

Composed compose(models::Decoder& model, const mesh::DeviceMesh& mesh,
                 comm::Communicator& ranks, const ComposeOptions& options) {
  Composed composed;
  composed.mesh = mesh;
  composed.coord = mesh.coord_of(ranks.rank());
  const auto group = [&](std::initializer_list<Axis> axes, const char* name) {
    return ranks.make_group(mesh.peers(ranks.rank(), axes), name);
  };

  // 1. Tensor parallelism first: it decides what a layer is on one rank, and
  //    all that follows cuts or copies that.
  if (mesh.degree(Axis::kTp) > 1) {
    tensor::apply(model, options.tensor, *group({Axis::kTp}, "tp"));
  }

  // 2. Which tokens are here changes no parameter, only how they see others.
  if (mesh.degree(Axis::kCp) > 1) {
    context::apply(model, options.context, *group({Axis::kCp}, "cp"));
  }

  // 3. Stages: what other ranks hold is not materialised here.
  composed.units.reads = reads_of(model);
  composed.units.chunks =
      pipeline::apply(model, options.pipeline, composed.coord[Axis::kPp]);
  composed.pipeline = group({Axis::kPp}, "pp");

  // 4. The data axes, and ZeRO among them, inside the boxes that are left. One
  //    rank has nobody to share with: it is plain data parallelism.
  const int64_t zero_stage =
      mesh.degree(Axis::kDpShard) > 1 ? options.zero_stage : 0;
  zero::set_layouts(nn::parameters_of(model), zero_stage);
  composed.data = group({Axis::kDpReplicate, Axis::kDpShard}, "data");

  // 5. Memory last of all that shapes parameters: every rank allocates and
  //    fills its own boxes, and none ever holds more.
  nn::materialise(model, mesh, composed.coord, options.materialise);
  if (options.load) options.load();

  // 6. What is gathered, freed and reduced as one.
  composed.units.zero_stage = zero_stage;
  composed.units.reshard_after_forward = options.reshard_after_forward;
  std::vector<std::vector<nn::Parameter>> units(model.num_units());
  for (auto& parameter : nn::parameters_of(model)) {
    if (!parameter.spec->layout.held_by(composed.coord)) continue;
    units[model.unit_of(parameter.name)].push_back(std::move(parameter));
  }
  composed.parameters = std::make_unique<zero::ShardedParameters>(
      std::move(units), mesh, ranks,
      zero::ShardingOptions{.stage = zero_stage,
                            .bucket_bytes = options.bucket_bytes});
  return composed;
}

}  // namespace tessera::parallel
