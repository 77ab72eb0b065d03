#include "tessera/comm/base/routed_backend.h"

#include <utility>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using Tensors = std::vector<at::Tensor>;
using Pending = c10::intrusive_ptr<c10d::Work>;

class RoutedBackend : public c10d::Backend {
 public:
  RoutedBackend(c10::intrusive_ptr<c10d::Backend> cpu,
                c10::intrusive_ptr<c10d::Backend> device, c10::DeviceType type)
      : Backend(cpu->getRank(), cpu->getSize()),
        cpu_(std::move(cpu)),
        device_(std::move(device)),
        type_(type) {}

  const std::string getBackendName() const override {
    return device_->getBackendName() + "+" + cpu_->getBackendName();
  }

  Pending allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override {
    return of(tensors.at(0)).allreduce(tensors, options);
  }

  Pending broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override {
    return of(tensors.at(0)).broadcast(tensors, options);
  }

  Pending _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return of(output, input)._allgather_base(output, input, options);
  }

  Pending _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    return of(output, input)._reduce_scatter_base(output, input, options);
  }

  Pending alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    return of(output, input)
        .alltoall_base(output, input, output_splits, input_splits, options);
  }

  Pending barrier(const c10d::BarrierOptions& options) override {
    return cpu_->barrier(options);
  }

  Pending send(Tensors& tensors, int peer, int tag) override {
    return of(tensors.at(0)).send(tensors, peer, tag);
  }

  Pending recv(Tensors& tensors, int peer, int tag) override {
    return of(tensors.at(0)).recv(tensors, peer, tag);
  }

 private:
  c10d::Backend& of(const at::Tensor& tensor) const {
    return tensor.device().type() == type_ ? *device_ : *cpu_;
  }

  c10d::Backend& of(const at::Tensor& output, const at::Tensor& input) const {
    TS_CHECK(output.device() == input.device(), "output lies on ",
             output.device(), ", input on ", input.device(),
             "; both must lie on one device.");
    return of(output);
  }

  c10::intrusive_ptr<c10d::Backend> cpu_;
  c10::intrusive_ptr<c10d::Backend> device_;
  const c10::DeviceType type_;
};

}  // namespace

Connection make_routed(Connection cpu, const Connection& device,
                       c10::DeviceType type) {
  Connection both = std::move(cpu);
  both.backend = c10::make_intrusive<RoutedBackend>(std::move(both.backend),
                                                    device.backend, type);
  both.device = type;
  both.fail = [fail_cpu = std::move(both.fail),
               fail_device = device.fail](const std::string& why) {
    fail_cpu(why);  // at once; a device may take its time
    fail_device(why);
  };
  return both;
}

}  // namespace tessera::comm
