// c10d::Backend from collectives that block: they run in the order of the calls
// on one thread of the group, so that the caller goes on meanwhile.
//
// Messages (send, recv) do not wait for that thread. After a failure all later
// collectives fail with it, and the connections below are failed too.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/base/backend_group.h"
#include "tessera/comm/group.h"

namespace tessera::comm::algorithms {

// The verbs of a group. All but send, recv and fail run on the group's thread.
class BlockingCollectives {
 public:
  virtual ~BlockingCollectives() = default;
  virtual std::string name() const = 0;

  virtual void all_reduce(const at::Tensor& tensor, ReduceOp op) = 0;
  virtual void all_gather(const at::Tensor& output,
                          const at::Tensor& input) = 0;
  virtual void reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                              ReduceOp op) = 0;
  // Splits: bytes for each rank.
  virtual void all_to_all(const at::Tensor& output, const at::Tensor& input,
                          std::vector<int64_t> output_splits,
                          std::vector<int64_t> input_splits) = 0;
  virtual void broadcast(const at::Tensor& tensor, int64_t root) = 0;
  virtual void barrier() = 0;

  using Message = c10::intrusive_ptr<c10d::Work>;
  virtual Message send(std::vector<at::Tensor>& tensors, int peer, int tag) = 0;
  virtual Message recv(std::vector<at::Tensor>& tensors, int peer, int tag) = 0;
  // From any thread: makes what is pending fail, here and on the peers.
  virtual void fail(const std::string& why) = 0;
  // See Connection::close.
  virtual void close() = 0;
};

Connection make_queued(int rank, int size,
                       std::unique_ptr<BlockingCollectives> collectives);

}  // namespace tessera::comm::algorithms
