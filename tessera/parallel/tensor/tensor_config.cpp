#include "tessera/parallel/tensor/tensor_config.h"

namespace tessera::parallel::tensor {

void TensorConfig::declare(config::Section& section) {
  section.key("sequence_parallel", sequence_parallel,
              "cut norms and residuals along the sequence over tp");
}

}  // namespace tessera::parallel::tensor
