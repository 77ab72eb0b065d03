#include "tessera/parallel/compose.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/memory_kind.h"
#include "tessera/models/hidden_matrix.h"
#include "tessera/models/product_types.h"
#include "tessera/parallel/context/context_parallel.h"
#include "tessera/parallel/expert/expert_parallel.h"
#include "tessera/parallel/pipeline/stages.h"
#include "tessera/parallel/tensor/tensor_parallel.h"

namespace tessera::parallel {
using mesh::Axis;

std::vector<std::vector<int64_t>> reads_of(models::Model& model) {
  std::vector<std::vector<int64_t>> reads(model.num_owners());
  for (int64_t unit = 0; unit < model.num_units(); ++unit) {
    reads[unit].push_back(unit);
  }
  for (const auto& parameter : nn::parameters_of(model)) {
    const int64_t owner = model.owner_of(*parameter.spec);
    for (int64_t unit : parameter.spec->units) {
      auto& all = reads[unit];
      if (std::ranges::count(all, owner) == 0) all.push_back(owner);
    }
  }
  return reads;
}

void check(const models::ModelConfig& model, int64_t seq_len,
           const mesh::DeviceMesh& mesh, const ParallelConfig& config) {
  tensor::check(model, seq_len, mesh, config.tensor);
  context::check(model, seq_len, mesh, config.context);
  expert::check(model, seq_len, mesh);
}

void check_generation(const mesh::Degrees& mesh) {
  context::check_generation(mesh);
}

int64_t local_length(int64_t seq_len, const mesh::DeviceMesh& mesh) {
  return context::local_length(seq_len, mesh);
}

at::Tensor Composed::local_tokens(const at::Tensor& tokens) const {
  return context::local_tokens(tokens, coord[Axis::kCp],
                               mesh.degree(Axis::kCp));
}

int64_t zero_stage_of(const mesh::Layout& layout, const mesh::DeviceMesh& mesh,
                      const ParallelConfig& config) {
  const int64_t stage = layout.is_of_expert() ? config.zero.stage_of_experts()
                                              : config.zero.stage;
  const bool gathers_alone = stage == 3 && config.zero.offloads_parameters();
  return mesh.degree(layout.data_axis()) > 1 || gathers_alone ? stage : 0;
}

void place(models::Model& model, const mesh::DeviceMesh& mesh,
           const ParallelConfig& config) {
  // 1. Tensor parallelism first: it decides what a layer is on one rank, and
  //    all that follows cuts or copies that.
  if (mesh.degree(Axis::kTp) > 1) tensor::place(model, mesh, config.tensor);
  // 2. Experts see the same ranks in a view of their own.
  expert::place(model, mesh);
  // 3. What sees other tokens pulls at the same parameters.
  context::place(model);
  // 4. The data axes, and ZeRO among them, inside the boxes that are left.
  for (const auto& parameter : nn::parameters_of(model)) {
    data::set_layout(parameter,
                     zero_stage_of(parameter.spec->layout, mesh, config));
  }
}

ModelUnits model_units(models::Model& model, const mesh::DeviceMesh& mesh,
                       const ParallelConfig& config) {
  ModelUnits units;
  units.reads = reads_of(model);
  units.chunks = pipeline::apply(model, mesh, config.pipeline);
  units.placement = config.pipeline.placement();
  units.num_units = model.num_units();
  for (int64_t unit = 0; unit < model.num_units(); ++unit) {
    if (model.is_ahead(unit)) units.ahead.insert(unit);
  }
  units.config = config;
  units.config.resolve(/*ranks_share_memory=*/false);
  units.zero_stages.assign(units.reads.size(), 0);
  units.parameters.resize(units.reads.size());
  for (auto& parameter : nn::parameters_of(model)) {
    const int64_t owner = model.owner_of(*parameter.spec);
    units.zero_stages[owner] =
        zero_stage_of(parameter.spec->layout, mesh, config);
    units.parameters[owner].push_back(std::move(parameter));
  }
  return units;
}

std::vector<bool> hidden_matrices(const Composed& composed) {
  std::set<std::string> names;
  for (const auto& unit : composed.model.parameters) {
    for (const auto& parameter : unit) {
      if (models::is_hidden_matrix(*parameter.spec, composed.model.num_units)) {
        names.insert(parameter.name);
      }
    }
  }
  std::vector<bool> are;
  for (const auto& parameter : composed.parameters->trained()) {
    are.push_back(names.contains(parameter.name));
  }
  return are;
}

namespace {

std::unique_ptr<data::WholeUpdates> whole_updates(
    const Composed& composed, comm::Communicator& ranks,
    const at::TensorOptions& numbers) {
  // By name: in bundles they lie as each rank's peers have it.
  std::map<std::string, data::WholeUpdates::Matrix> by_name;
  const auto are = hidden_matrices(composed);
  for (size_t i = 0; i < are.size(); ++i) {
    const auto& parameter = composed.parameters->trained()[i];
    if (are[i]) by_name[parameter.name] = {i, parameter.unit, parameter.layout};
  }
  std::vector<data::WholeUpdates::Matrix> matrices;
  for (const auto& [name, matrix] : by_name) matrices.push_back(matrix);
  return std::make_unique<data::WholeUpdates>(matrices, composed.mesh, ranks,
                                              numbers);
}

}  // namespace

Composed compose(models::Model& model, const mesh::DeviceMesh& mesh,
                 comm::Communicator& ranks, const ComposeOptions& options) {
  ParallelConfig config = options.config;
  config.resolve(ranks.backend() == "shm");
  Composed composed;
  composed.mesh = mesh;
  composed.coord = mesh.coord_of(ranks.rank());
  composed.activations = at::TensorOptions(config.precision.compute_dtype())
                             .device(options.device);
  const auto group = [&](std::initializer_list<Axis> axes, const char* name) {
    return ranks.make_group(mesh.peers(ranks.rank(), axes), name);
  };

  // 1. Where parameters are, and how they are multiplied.
  place(model, mesh, config);
  models::set_products(model, config.precision.product_type());

  // 2. What ranks of tp do together. Which tokens are here changes no
  //    parameter, only how they see others.
  expert::ExpertOptions experts{
      .sequence_parallel = config.tensor.sequence_parallel,
      .dispatch_chunks = config.expert.dispatch_chunks};
  if (mesh.degree(Axis::kTp) > 1) {
    comm::Group& tp = *group({Axis::kTp}, "tp");
    tensor::apply(model, config.tensor, tp);
    experts.region = tensor::region(config.tensor, tp);
  }
  if (mesh.degree(Axis::kCp) > 1) {
    experts.sample_axes = {Axis::kCp};
    context::apply(model, config.context, *group({Axis::kCp}, "cp"));
  }

  // 3. Experts follow both, with dispatches of theirs.
  expert::apply(model, experts, mesh, ranks);

  // 4. Stages, and what each unit shares: what other ranks hold is not
  //    materialised here.
  composed.model = model_units(model, mesh, config);
  composed.units = composed.model.units_of(mesh, ranks.rank());
  composed.pipeline = group({Axis::kPp}, "pp");
  composed.data = group({Axis::kDpReplicate, Axis::kDpShard}, "data");

  // 5. Memory last of all that shapes parameters: every rank allocates and
  //    fills its own boxes, and none ever holds more.
  const MemoryScope scope(MemoryKind::kParameters);
  nn::ParameterMemory memory;
  if (options.memory) {
    memory = [&](const nn::Parameter& parameter, at::IntArrayRef sizes,
                 at::ScalarType type) {
      const int64_t owner = model.owner_of(*parameter.spec);
      const bool stays = composed.model.zero_stages.at(owner) == 0;
      return options.memory(stays ? owner : -1, sizes, type);
    };
  }
  nn::materialise(model, mesh, composed.coord,
                  {.seed = options.seed,
                   .dtype = config.precision.compute_dtype(),
                   .device = options.device,
                   .fill = options.load == nullptr,
                   .memory = memory});
  if (options.load) options.load();

  // 6. What is gathered, freed and reduced as one.
  std::vector<std::vector<data::Bundle>> bundles;
  for (size_t unit = 0; unit < composed.model.parameters.size(); ++unit) {
    bundles.push_back(
        composed.model.bundles(static_cast<int64_t>(unit), mesh, ranks.rank()));
  }
  std::optional<data::GradientOptions> gradients;
  if (options.trains) {
    gradients = {
        .dtype = config.precision.gradient_dtype(),
        .bucket_bytes = config.zero.bucket_bytes(),
        .may_be_unwritten = true,
        .batches = config.pipeline.batches_of_a_unit(options.micro_batches)};
  }
  composed.parameters = std::make_unique<data::ShardedParameters>(
      std::move(bundles), ranks, gradients, composed.activations.device(),
      options.memory,
      options.trains ? composed.units.versions : program::Versions{});
  if (options.trains && config.whole_matrices) {
    composed.updates = whole_updates(
        composed, ranks, composed.activations.dtype(config.updates().dtype));
  }
  return composed;
}

}  // namespace tessera::parallel
