#include "tessera/comm/algorithms/flat.h"

#include "tessera/comm/algorithms/backend_transport.h"
#include "tessera/comm/algorithms/blocking_calls.h"
#include "tessera/comm/base/partial_sums.h"

namespace tessera::comm::algorithms {
namespace {

class Flat : public BlockingCollectives {
 public:
  Flat(Connection inner, Chooser choose)
      : inner_(std::move(inner)),
        transport_(inner_.backend),
        choose_(std::move(choose)) {}

  std::string name() const override { return inner_.backend->getBackendName(); }

  void all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    const Algorithm algorithm = choose(Verb::kAllReduce, tensor);
    if (algorithm == Algorithm::kOwn) {
      return call_all_reduce(*inner_.backend, tensor, op);
    }
    const Elements result = elements_of(tensor);
    const Partial partial(result);
    algorithms::all_reduce(transport_, algorithm, partial.elements(), result,
                           {op, transport_.size()});
  }

  void all_gather(const at::Tensor& output, const at::Tensor& input) override {
    const Algorithm algorithm = choose(Verb::kAllGather, output);
    if (algorithm == Algorithm::kOwn) {
      return call_all_gather(*inner_.backend, output, input);
    }
    const Elements whole = elements_of(output);
    const int64_t rank = transport_.rank();
    const Bounds bounds = even_bounds(whole.numel, transport_.size());
    // `output` may hold `input` at its place already.
    copy(elements_of(input), pieces_of(whole, bounds, rank, rank + 1));
    algorithms::all_gather(transport_, algorithm, whole, bounds);
  }

  void reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      ReduceOp op) override {
    const Algorithm algorithm = choose(Verb::kReduceScatter, input);
    if (algorithm == Algorithm::kOwn) {
      return call_reduce_scatter(*inner_.backend, output, input, op);
    }
    const Elements values = elements_of(input);
    const Scratch partial(values.numel, partial_dtype(values.dtype));
    begin_partial(values, partial.elements());
    algorithms::reduce_scatter(transport_, algorithm, partial.elements(),
                               even_bounds(values.numel, transport_.size()),
                               elements_of(output), {op, transport_.size()});
  }

  void all_to_all(const at::Tensor& output, const at::Tensor& input,
                  std::vector<int64_t> output_splits,
                  std::vector<int64_t> input_splits) override {
    call_all_to_all(*inner_.backend, output, input, std::move(output_splits),
                    std::move(input_splits));
  }

  void broadcast(const at::Tensor& tensor, int64_t root) override {
    const Algorithm algorithm = choose(Verb::kBroadcast, tensor);
    if (algorithm == Algorithm::kOwn) {
      return call_broadcast(*inner_.backend, tensor, root);
    }
    algorithms::broadcast(transport_, algorithm, elements_of(tensor).bytes(),
                          root);
  }

  void barrier() override { call_barrier(*inner_.backend); }

  Message send(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    return inner_.backend->send(tensors, peer, tag);
  }
  Message recv(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    return inner_.backend->recv(tensors, peer, tag);
  }
  void fail(const std::string& why) override { inner_.fail(why); }
  void close() override { inner_.close(); }

 private:
  Algorithm choose(Verb verb, const at::Tensor& larger) const {
    return choose_(verb, static_cast<int64_t>(larger.nbytes()));
  }

  Connection inner_;
  BackendTransport transport_;
  Chooser choose_;
};

}  // namespace

Connection make_flat(Connection inner, Chooser choose) {
  const int rank = inner.backend->getRank();
  const int size = inner.backend->getSize();
  auto empty = inner.empty;
  Connection flat = make_queued(
      rank, size, std::make_unique<Flat>(std::move(inner), std::move(choose)));
  flat.empty = std::move(empty);
  return flat;
}

}  // namespace tessera::comm::algorithms
