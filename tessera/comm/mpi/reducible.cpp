#include "tessera/comm/mpi/reducible.h"

#include <ATen/ops/empty.h>

#include "tessera/comm/base/partial_sums.h"

namespace tessera::comm::mpi {

Reducible::Reducible(const at::Tensor& tensor, bool apart)
    : tensor_(tensor), buffer_(tensor) {
  const at::ScalarType dtype = partial_dtype(tensor.scalar_type());
  if (apart || dtype != tensor.scalar_type()) {
    buffer_ = at::empty(tensor.sizes(), tensor.options().dtype(dtype));
  }
}

void Reducible::read() const {
  begin_partial(tensor_.const_data_ptr(), buffer_.data_ptr(), tensor_.numel(),
                tensor_.scalar_type());
}

void Reducible::write(ReduceOp op, int64_t ranks) const {
  finish_partial(buffer_.data_ptr(), tensor_.data_ptr(), tensor_.numel(),
                 tensor_.scalar_type(), op, ranks);
}

}  // namespace tessera::comm::mpi
