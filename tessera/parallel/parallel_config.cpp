#include "tessera/parallel/parallel_config.h"

namespace tessera::parallel {

void ParallelConfig::resolve(bool ranks_share_memory) {
  zero = zero.resolved(ranks_share_memory);
  expert = expert.resolved(ranks_share_memory);
}

data::UpdateOptions ParallelConfig::updates() const {
  const at::ScalarType compute = precision.compute_dtype();
  const bool narrow = orthogonalised_in_bf16 ||
                      c10::elementSize(compute) < c10::elementSize(at::kFloat);
  return {whole_matrices, narrow ? at::kBFloat16 : compute, orthogonal_steps};
}

}  // namespace tessera::parallel
