#include "tessera/parallel/compose.h"

#include <utility>
#include <vector>

#include "tessera/core/memory_kind.h"

namespace tessera::parallel {
namespace {

using mesh::Axis;

// Experts are gathered and reduced apart from the block that runs them: their
// unit owns parameters and never runs.
int64_t experts_of(const models::Decoder& model, int64_t block) {
  return model.num_units() + block - 1;
}

int64_t owner_of(const models::Decoder& model, const nn::Parameter& parameter) {
  const int64_t unit = model.unit_of(parameter.name);
  return parameter.spec->layout.is_of_expert() ? experts_of(model, unit) : unit;
}

// A unit reads its own parameters and those of its experts; with tied
// embeddings the last one reads those of the first too.
std::vector<std::vector<int64_t>> reads_of(const models::Decoder& model) {
  const auto layers = static_cast<int64_t>(model.blocks().size());
  std::vector<std::vector<int64_t>> reads(model.num_units() + layers);
  for (int64_t unit = 0; unit < model.num_units(); ++unit) {
    reads[unit].push_back(unit);
  }
  for (int64_t layer = 0; layer < layers; ++layer) {
    if (!model.blocks()[layer]->moe()) continue;
    reads[layer + 1].push_back(experts_of(model, layer + 1));
  }
  if (model.config().tie_embeddings) reads[model.num_units() - 1].push_back(0);
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
  expert::ExpertOptions experts{.sequence_parallel =
                                    options.tensor.sequence_parallel};
  if (mesh.degree(Axis::kTp) > 1) {
    comm::Group& tp = *group({Axis::kTp}, "tp");
    tensor::apply(model, options.tensor, tp);
    experts.region = tensor::region(options.tensor, tp);
  }

  // 2. Experts see the same ranks in a view of their own.
  expert::apply(model, experts, mesh, ranks);

  // 3. Which tokens are here changes no parameter, only how they see others.
  if (mesh.degree(Axis::kCp) > 1) {
    context::apply(model, options.context, *group({Axis::kCp}, "cp"));
  }

  // 4. Stages: what other ranks hold is not materialised here.
  composed.units.reads = reads_of(model);
  composed.units.chunks =
      pipeline::apply(model, options.pipeline, composed.coord[Axis::kPp]);
  composed.pipeline = group({Axis::kPp}, "pp");

  // 5. The data axes, and ZeRO among them, inside the boxes that are left. One
  //    rank has nobody to share with: it is plain data parallelism.
  const int64_t num_units = composed.units.reads.size();
  composed.units.zero_stages.assign(num_units, 0);
  for (const auto& parameter : nn::parameters_of(model)) {
    const auto& layout = parameter.spec->layout;
    const bool alone = mesh.degree(layout.data_axis()) == 1;
    const int64_t stage = alone                   ? 0
                          : layout.is_of_expert() ? options.expert_zero_stage
                                                  : options.zero_stage;
    composed.units.zero_stages[owner_of(model, parameter)] = stage;
    data::set_layout(parameter, stage);
  }
  composed.data = group({Axis::kDpReplicate, Axis::kDpShard}, "data");

  // 6. Memory last of all that shapes parameters: every rank allocates and
  //    fills its own boxes, and none ever holds more.
  const MemoryScope scope(MemoryKind::kParameters);
  nn::materialise(model, mesh, composed.coord, options.materialise);
  if (options.load) options.load();

  // 7. What is gathered, freed and reduced as one.
  composed.units.reshard_after_forward = options.reshard_after_forward;
  std::vector<std::vector<nn::Parameter>> units(num_units);
  for (auto& parameter : nn::parameters_of(model)) {
    if (!parameter.spec->layout.held_by(composed.coord)) continue;
    const int64_t owner = owner_of(model, parameter);
    units[owner].push_back(std::move(parameter));
  }
  composed.parameters = std::make_unique<data::ShardedParameters>(
      std::move(units), mesh, ranks,
      data::ShardingOptions{.stages = composed.units.zero_stages,
                            .gradient_dtype = options.gradient_dtype,
                            .bucket_bytes = options.bucket_bytes});
  return composed;
}

}  // namespace tessera::parallel
