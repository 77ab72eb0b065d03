#include "tessera/parallel/facts.h"

#include <vector>

#include "tessera/parallel/data/parameter_facts.h"

namespace tessera::parallel {

program::Facts facts_of(const models::ModelConfig& model_config,
                        const mesh::DeviceMesh& mesh, const mesh::Coord& coord,
                        const ParallelConfig& config,
                        const FactsOptions& batch) {
  const at::ScalarType compute = config.precision.compute_dtype();
  const at::ScalarType gradient = config.precision.gradient_dtype();
  program::Facts facts =
      models::facts_of(model_config, mesh, coord,
                       {.samples = batch.samples,
                        .seq_len = batch.seq_len,
                        .compute = compute,
                        .gradient = gradient,
                        .sequence_parallel = config.tensor.sequence_parallel,
                        .context_method = config.context.method,
                        .threads = batch.threads});
  const auto model = models::make_model(model_config);
  place(*model, mesh, config);
  const auto reads = reads_of(*model);
  std::vector<std::vector<const nn::ParameterSpec*>> owned(reads.size());
  for (const auto& parameter : nn::parameters_of(*model)) {
    owned[owner_of(*model, *parameter.spec)].push_back(parameter.spec.get());
  }
  for (size_t unit = 0; unit < reads.size(); ++unit) {
    facts.units[unit].reads = reads[unit];
    if (owned[unit].empty()) continue;
    facts.units[unit].parameters = data::parameter_facts(
        owned[unit], mesh, coord,
        {.zero_stage = zero_stage_of(owned[unit].front()->layout, mesh, config),
         .compute = compute,
         .gradient = gradient,
         .moments = batch.moments});
  }
  return facts;
}

}  // namespace tessera::parallel
