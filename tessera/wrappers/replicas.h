// Copies of a module, one a device, around device 0: its parameters are the
// ones that are updated; the others get theirs from it and send it gradients.
//
//   replicas.replicate();                       // parameters out of device 0
//   replicas.run(n, [&](size_t device) { loss_of(slice[device]).backward(); });
//   replicas.reduce_gradients();                // gradients into device 0
//   optimizer.step();                           // on device 0's parameters
//
// Comm:    no process and no collective: copies inside one process, a star.
//          With S bytes of parameters and N devices, a step moves (N-1) S out
//          of and (N-1) S into device 0, and S in and S out for each other.
//          (A ring moves 2 (N-1)/N S each way on every device.)
// Order:   gradients are summed in the order of the devices.
// Devices: on the CPU a "device" is a thread with a replica of its own.
// Threads: one thread a device runs the work; everything is called by one
//          thread at a time, and work may touch its own replica alone.
// Errors:  what work throws is thrown again, with its device named.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace tessera::wrappers {

class DeviceThreads;

// Bytes into and out of one device, since construction.
struct DeviceTraffic {
  int64_t model_in = 0;  // parameters, buffers, gradients of parameters
  int64_t model_out = 0;
  int64_t batch_in = 0;  // inputs, outputs, gradients of these
  int64_t batch_out = 0;
};

// Gradients of one device's parameters; undefined where there is none.
using Gradients = std::vector<at::Tensor>;

class Replicas {
 public:
  using ModulePtr = std::shared_ptr<torch::nn::Module>;

  // REQUIRES: modules[i] lies on devices[i] and all have the same parameters
  // and buffers; modules[0] is the one that is trained.
  Replicas(std::vector<ModulePtr> modules, std::vector<at::Device> devices);
  ~Replicas();

  size_t size() const { return devices_.size(); }
  const std::vector<at::Device>& devices() const { return devices_; }
  // Each tensor once, in the order of declaration.
  const std::vector<at::Tensor>& parameters(size_t device) const {
    return parameters_.at(device);
  }

  // Device 0's parameters, buffers and modes (training, requires_grad) to the
  // first `active` devices.
  void replicate(size_t active);
  void replicate() { replicate(size()); }

  void run(size_t active, const std::function<void(size_t device)>& work);

  // Adds every replica's .grad to device 0's and clears it.
  void reduce_gradients();
  // The same for gradients that lie elsewhere, one list a device: the sum for
  // each of parameters(0).
  Gradients sum_on_first(const std::vector<Gradients>& gradients);

  const std::vector<DeviceTraffic>& traffic() const { return traffic_; }
  // Spent on copying parameters and summing gradients, since construction: time
  // in which no device computes.
  double star_seconds() const { return star_seconds_; }
  // Books a copy of part of a batch between device 0 and `device`.
  void count_batch(size_t from, size_t to, const at::Tensor& tensor);

 private:
  void collect_tensors(size_t device);
  void copy_from_first(size_t device);
  at::Tensor to_first(size_t device, const at::Tensor& gradient);

  std::vector<ModulePtr> modules_;
  std::vector<at::Device> devices_;
  std::vector<std::vector<at::Tensor>> parameters_;  // [device], each once
  std::vector<std::vector<at::Tensor>> state_;  // [device], and the buffers
  // Which of device 0's parameters each is a copy of. Replicas of a module with
  // tied parameters may hold them apart.
  std::vector<std::vector<size_t>> owner_;  // [device]
  std::vector<DeviceTraffic> traffic_;      // [device]
  double star_seconds_ = 0;
  std::unique_ptr<DeviceThreads> threads_;
};

}  // namespace tessera::wrappers
