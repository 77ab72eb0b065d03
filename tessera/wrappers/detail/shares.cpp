#include "tessera/wrappers/detail/shares.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"

namespace tessera::wrappers {

at::Tensor share_of(const at::Tensor& whole, int64_t dim,
                    const comm::Group& group, const std::string& name) {
  const at::NoGradGuard no_grad;
  if (dim < 0) return whole.detach().clone();
  TS_CHECK_CONFIG(dim < whole.dim() && whole.size(dim) % group.size() == 0,
                  "tensor parallel: dim ", dim, " of ", name, " ",
                  whole.sizes(), " does not divide by the ", group.size(),
                  " ranks along tp. Use another tp, or leave it out of the "
                  "plan.");
  return whole.detach().chunk(group.size(), dim)[group.rank()].clone();
}

}  // namespace tessera::wrappers
