// A tensor as MPI reduces it, which knows neither half precision nor the mean:
// as partial sums (base/partial_sums.h). REQUIRES: it is contiguous.
//
// Threads: read() and write() on the progress thread; no kernel of LibTorch
//          runs in them, and so no team of threads beside the rank's own.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"

namespace tessera::comm::mpi {

class Reducible {
 public:
  // `apart`: MPI is to have a buffer of its own in any case.
  explicit Reducible(const at::Tensor& tensor, bool apart = false);

  void* data() const { return buffer_.data_ptr(); }
  at::ScalarType dtype() const { return buffer_.scalar_type(); }
  // The tensor into the buffer, where that is another one.
  void read() const;
  // The buffer, divided by the `ranks` for a mean, into the tensor.
  void write(ReduceOp op, int64_t ranks) const;

 private:
  at::Tensor tensor_;
  at::Tensor buffer_;  // the tensor itself where it can be
};

}  // namespace tessera::comm::mpi
