// A group whose backend carries tensors of the CPU, for those of a device too:
// they go through the host.
//
// Comm:    one operation of the backend for each, as for CPU tensors.
// Host:    the call waits until the device has computed what is sent; what
//          comes is copied to the device in wait(), in the order of its stream.
// Memory:  the tensors once more on the host, until then.
#pragma once

#include "tessera/comm/base/backend_group.h"

namespace tessera::comm {

class StagedGroup final : public BackendGroup {
 public:
  using BackendGroup::BackendGroup;

  Work all_reduce(at::Tensor tensor, ReduceOp op, Mode mode) override;
  Work all_gather(at::Tensor output, at::Tensor input, Mode mode) override;
  Work reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                      Mode mode) override;
  Work all_to_all(at::Tensor output, at::Tensor input,
                  std::vector<int64_t> output_splits,
                  std::vector<int64_t> input_splits, Mode mode) override;
  Work broadcast(at::Tensor tensor, int64_t root, Mode mode) override;
  Work send(at::Tensor tensor, int64_t peer, int64_t tag) override;
  Work recv(at::Tensor tensor, int64_t peer, int64_t tag) override;

 private:
  bool is_plain(const at::Tensor& tensor) const;
};

}  // namespace tessera::comm
