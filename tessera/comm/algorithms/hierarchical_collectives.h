// The collectives of a hierarchy: see hierarchical.h. Not for others.
#pragma once

#include <ATen/ops/empty.h>

#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include "tessera/comm/algorithms/backend_transport.h"
#include "tessera/comm/algorithms/blocking_calls.h"
#include "tessera/comm/algorithms/hierarchical.h"
#include "tessera/comm/base/keep_for_ever.h"
#include "tessera/comm/base/split_bytes.h"

namespace tessera::comm::algorithms {

class Hierarchical : public BlockingCollectives {
 public:
  Hierarchical(Hierarchy hierarchy, Chooser choose);

  std::string name() const override { return "hierarchical"; }

  void all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    if (tensor.numel() == 0) return;
    map_.is_even() ? all_reduce_by_parts(tensor, op)
                   : all_reduce_by_leaders(tensor, op);
  }

  void all_gather(const at::Tensor& output, const at::Tensor& input) override {
    if (input.numel() == 0) return;
    const at::Tensor in = bytes_of(input);
    map_.is_even() ? all_gather_by_parts(output, in)
                   : all_gather_by_leaders(output, in);
  }

  void reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      ReduceOp op) override {
    if (output.numel() == 0) return;
    map_.is_even() ? reduce_scatter_by_parts(output, input, op)
                   : reduce_scatter_by_leaders(output, input, op);
  }

  void all_to_all(const at::Tensor& output, const at::Tensor& input,
                  std::vector<int64_t> output_splits,
                  std::vector<int64_t> input_splits) override;
  void broadcast(const at::Tensor& tensor, int64_t root) override;
  void barrier() override;

  Message send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  Message recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;

  // Whoever waits for this rank, on either side, must hear of it.
  void fail(const std::string& why) override {
    inside_.fail(why);
    across_.fail(why);
  }
  void close() override {
    inside_.close();
    across_.close();
  }

 private:
  void all_reduce_by_parts(const at::Tensor& tensor, ReduceOp op);
  void all_reduce_by_leaders(const at::Tensor& tensor, ReduceOp op);
  void all_gather_by_parts(const at::Tensor& output, const at::Tensor& in);
  void all_gather_by_leaders(const at::Tensor& output, const at::Tensor& in);
  void reduce_scatter_by_parts(const at::Tensor& output,
                               const at::Tensor& input, ReduceOp op);
  void reduce_scatter_by_leaders(const at::Tensor& output,
                                 const at::Tensor& input, ReduceOp op);

  struct Moves;
  struct HandedOver;
  void choose_ways(Moves& moves, const std::vector<int64_t>& input_splits);
  // Appends to `splits` how many bytes are for each.
  at::Tensor packed_inside(const Moves& moves,
                           std::vector<int64_t>& splits) const;
  HandedOver move_inside(const Moves& moves);
  void move_between(const Moves& moves, const HandedOver& handed);
  void move_straight(const Moves& moves);

  // The algorithm of the part of `bytes` that goes across.
  Algorithm choose(Verb verb, int64_t bytes) const;
  Reduction reduction(ReduceOp op) const { return {op, everyone_.size()}; }
  // `input`, of a piece a rank, as partial sums; pieces as `order` lists ranks.
  at::Tensor ordered_partial(const at::Tensor& input,
                             const std::vector<int64_t>& order) const;
  // Ranks by place and host, and by host and place.
  std::vector<int64_t> by_place() const;
  std::vector<int64_t> by_host() const;
  // Where the hosts' shares of pieces of `piece` elements begin.
  Bounds host_bounds(int64_t piece) const;

  const HostMap map_;
  const Connection inside_;
  const Connection across_;
  const Chooser choose_;
  BackendTransport everyone_;
  // One rank of each host: those at this rank's place, or the leaders where
  // hosts are not even; none on the other ranks of such hosts.
  std::optional<Subset> bridge_;
  std::optional<Subset> leaders_;  // on leaders
};

inline at::Tensor empty_of(int64_t numel, at::ScalarType dtype) {
  return at::empty({numel}, at::TensorOptions(dtype));
}

// A tensor for its scope that messages go out of and into, with the rule of
// Scratch: it stays where an exception ends the scope.
class ScratchTensor {
 public:
  explicit ScratchTensor(at::Tensor tensor)
      : tensor_(std::make_unique<at::Tensor>(std::move(tensor))),
        exceptions_(std::uncaught_exceptions()) {}
  ~ScratchTensor() {
    if (std::uncaught_exceptions() > exceptions_) {
      keep_for_ever(tensor_.release());
    }
  }
  ScratchTensor(const ScratchTensor&) = delete;
  ScratchTensor& operator=(const ScratchTensor&) = delete;

  const at::Tensor& tensor() const { return *tensor_; }
  Elements elements() const { return elements_of(*tensor_); }

 private:
  std::unique_ptr<at::Tensor> tensor_;
  int exceptions_;
};

}  // namespace tessera::comm::algorithms
