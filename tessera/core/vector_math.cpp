#include "tessera/core/vector_math.h"

#include <ATen/ATen.h>

namespace tessera {

void settle_vector_math() {
  static const bool settled = at::exp(at::zeros({1}, at::kDouble)).defined();
  static_cast<void>(settled);
}

}  // namespace tessera
