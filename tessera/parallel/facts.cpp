#include "tessera/parallel/facts.h"

#include <tuple>
#include <vector>

#include "tessera/models/trace/model_facts.h"
#include "tessera/parallel/compose.h"
#include "tessera/parallel/context/context_facts.h"
#include "tessera/parallel/expert/expert_facts.h"
#include "tessera/parallel/tensor/tensor_facts.h"

namespace tessera::parallel {

using mesh::Axis;

namespace {

// What compose() does to activations, in its order.
models::trace::TracedModel traced_model(const models::ModelConfig& of,
                                        const mesh::DeviceMesh& mesh,
                                        const mesh::Coord& coord,
                                        const ParallelConfig& config,
                                        const FactsOptions& batch) {
  models::trace::TracedModel model(of, batch.samples, batch.seq_len);
  model.documents = batch.documents;
  model.depths = batch.depths;
  model.products = config.precision.product_type();
  model.attention_again = config.recompute.mode == "selective";
  expert::TracedOptions experts{
      .sequence_parallel = config.tensor.sequence_parallel,
      .received_rows = batch.received_rows,
      .dispatch_chunks =
          config.expert.resolved(/*ranks_share_memory=*/false).dispatch_chunks};
  if (mesh.degree(Axis::kTp) > 1) {
    tensor::apply(model, mesh, coord, config.tensor);
    experts.region = tensor::traced_region(mesh, config.tensor);
  }
  if (mesh.degree(Axis::kCp) > 1) {
    experts.sample_axes = {Axis::kCp};
    context::apply(model, mesh, coord, config.context);
  }
  expert::apply(model, experts, mesh, coord);
  return model;
}

}  // namespace

PlacedModel::PlacedModel(const models::ModelConfig& model,
                         const mesh::DeviceMesh& mesh,
                         const ParallelConfig& config)
    : config_(model),
      mesh_(mesh),
      parallel_(config),
      model_(models::make_model(model)) {
  place(*model_, mesh, config);
  const auto parameters = nn::parameters_of(*model_);
  // Those of stages 2 and 3 are reduced with each micro-batch.
  are_whole_ = zero_stage_of(parameters.front().spec->layout, mesh, config) < 2;
  reads_ = reads_of(*model_);
  owned_.resize(reads_.size());
  for (const auto& parameter : parameters) {
    owned_[model_->owner_of(*parameter.spec)].push_back(parameter.spec.get());
  }
}

program::Facts PlacedModel::facts_of(const mesh::Coord& coord,
                                     const FactsOptions& batch,
                                     std::optional<double> dropout) const {
  const auto& [mesh, config] = std::tie(mesh_, parallel_);
  models::ModelConfig model_config = config_;
  if (dropout) model_config.dropout = *dropout;
  const at::ScalarType compute = config.precision.compute_dtype();
  const at::ScalarType gradient = config.precision.gradient_dtype();
  program::Facts facts = models::trace::facts_of(
      traced_model(model_config, mesh, coord, config, batch),
      {.compute = compute,
       .gradient = gradient,
       .threads = batch.threads,
       .batches = are_whole_
                      ? config.pipeline.batches_of_a_unit(batch.micro_batches)
                      : 1,
       .device = batch.device});
  for (size_t unit = 0; unit < reads_.size(); ++unit) {
    facts.units[unit].reads = reads_[unit];
    if (owned_[unit].empty()) continue;
    facts.units[unit].parameters = data::parameter_facts(
        owned_[unit], mesh, coord,
        {.zero_stage =
             zero_stage_of(owned_[unit].front()->layout, mesh, config),
         .compute = compute,
         .gradient = gradient,
         .kept = batch.kept,
         .updates = config.updates(),
         .num_units = model_->num_units(),
         .versions =
             config.pipeline.versions(mesh.degree(Axis::kPp), coord[Axis::kPp]),
         .crosses =
             config.zero.offloads_parameters() && batch.device != c10::kCPU,
         .two_replicas =
             config.pipeline.placement() == program::Placement::kMirrored});
  }
  return facts;
}

}  // namespace tessera::parallel
