#include "tessera/optim/update_group.h"

#include <ATen/ATen.h>

#include "tessera/optim/gradient_norm.h"

namespace tessera::optim {

void update_in_passes(const UpdateGroup& group,
                      const std::function<void(const UpdateGroup&)>& update) {
  UpdateGroup plain = group;
  for (at::Tensor& gradient : plain.gradients) {
    gradient = gradient.to(group.parameters.front().scalar_type());
  }
  TORCH_INTERNAL_ASSERT(!group.scale_there.defined(),
                        "operators heed no scale that is on the device");
  scale_gradients(plain.gradients, group.gradient_scale);
  update(plain);
  for (size_t i = 0; i < group.copies.size(); ++i) {
    if (group.copies[i].defined()) group.copies[i].copy_(group.parameters[i]);
  }
}

}  // namespace tessera::optim
