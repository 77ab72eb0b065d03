#include "tessera/parallel/facts.h"

#include <vector>

#include "tessera/parallel/data/parameter_facts.h"

namespace tessera::parallel {

program::Facts facts_of(const models::ModelConfig& config,
                        const mesh::DeviceMesh& mesh, const mesh::Coord& coord,
                        const ComposeOptions& options,
                        const FactsOptions& batch) {
  const at::ScalarType compute = options.materialise.dtype;
  program::Facts facts =
      models::facts_of(config, mesh, coord,
                       {.samples = batch.samples,
                        .seq_len = batch.seq_len,
                        .compute = compute,
                        .gradient = options.units.gradient_dtype,
                        .sequence_parallel = options.tensor.sequence_parallel,
                        .context_method = options.context.method,
                        .threads = batch.threads});
  const auto model = models::make_model(config);
  place(*model, mesh, options);
  const auto reads = reads_of(*model);
  std::vector<std::vector<const nn::ParameterSpec*>> owned(reads.size());
  for (const auto& parameter : nn::parameters_of(*model)) {
    owned[model->owner_of(*parameter.spec)].push_back(parameter.spec.get());
  }
  for (size_t unit = 0; unit < reads.size(); ++unit) {
    facts.units[unit].reads = reads[unit];
    if (owned[unit].empty()) continue;
    facts.units[unit].parameters =
        data::parameter_facts(owned[unit], mesh, coord,
                              {.zero_stage = zero_stage_of(
                                   owned[unit].front()->layout, mesh, options),
                               .compute = compute,
                               .gradient = options.units.gradient_dtype,
                               .moments = batch.moments});
  }
  return facts;
}

}  // namespace tessera::parallel
