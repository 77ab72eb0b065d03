// DataParallel: one process, one thread a device, around device 0. For any
// module.
//
//   tessera::DataParallel model(net, tessera::cpu_devices(4));
//   auto loss = mse_loss(model.forward(inputs), targets);  // on device 0
//   loss.backward();  // on all devices; gradients are summed on device 0
//   optimizer.step();  // on net's parameters
//
// Shapes:  every tensor of one or more dims that is given to forward() is cut
//          along dim 0 into slices of ceil(B/N), the last one shorter; fewer
//          samples than devices leave devices idle. Other arguments go to all
//          as they are. Outputs (a tensor, or a tuple of tensors) are joined
//          along dim 0.
// Comm:    forward() copies parameters, buffers and slices out of device 0 and
//          outputs into it; backward the other way: see Replicas. It shows by
//          its traffic and by device 0's memory why DistributedDataParallel is
//          to be preferred.
// Buffers: those of device 0's module are kept (BatchNorm: of its slice).
// Errors:  an output without dims is refused: reduce on device 0. What a
//          replica throws is thrown again with its device named.
// Limits:  no second derivatives. CPU dropout draws from one generator in the
//          order in which threads come.
// Threads: forward and backward are called by one thread at a time.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/wrappers/replicas.h"

namespace tessera {

// `count` worker threads of the CPU.
inline std::vector<at::Device> cpu_devices(size_t count) {
  return std::vector<at::Device>(count, at::kCPU);
}

namespace wrappers {

// What one replica does with its slices of the input tensors.
using SliceForward = std::function<std::vector<at::Tensor>(
    size_t device, const std::vector<at::Tensor>& slices)>;

// Scatters, replicates, runs, gathers; autograd sees one function from `inputs`
// and device 0's parameters to the joined outputs.
std::vector<at::Tensor> scattered_forward(
    const std::shared_ptr<Replicas>& replicas,
    const std::vector<at::Tensor>& inputs, const SliceForward& forward);

template <typename T>
inline constexpr bool is_tensor = std::is_same_v<T, at::Tensor>;
template <typename T>
inline constexpr bool hides_tensors =
    std::is_same_v<T, std::optional<at::Tensor>> ||
    std::is_same_v<T, std::vector<at::Tensor>>;

inline std::vector<at::Tensor> to_list(const at::Tensor& output) {
  return {output};
}
template <typename... T>
std::vector<at::Tensor> to_list(const std::tuple<T...>& outputs) {
  static_assert((is_tensor<T> && ...), "forward() must return tensors");
  return std::apply(
      [](const auto&... output) { return std::vector<at::Tensor>{output...}; },
      outputs);
}

template <typename Output>
Output from_list(const std::vector<at::Tensor>& list) {
  if constexpr (is_tensor<Output>) {
    return list.at(0);
  } else {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return Output{list.at(I)...};
    }(std::make_index_sequence<std::tuple_size_v<Output>>());
  }
}

// The next slice where the argument is a tensor, else the argument itself.
template <typename T>
T own_argument(const T& argument, const std::vector<at::Tensor>& slices,
               size_t& next) {
  if constexpr (is_tensor<T>) {
    return slices.at(next++);
  } else {
    return argument;
  }
}

}  // namespace wrappers

// Holder: a module holder (Linear) or a std::shared_ptr to a module.
template <typename Holder>
class DataParallel {
 public:
  using Module = std::remove_reference_t<decltype(*std::declval<Holder&>())>;
  using Replicas = wrappers::Replicas;

  // `module` lies on devices[0] and is the one that is trained; the other
  // replicas are its clones, or, for a module that has no clone(), what `make`
  // builds.
  DataParallel(Holder module, std::vector<at::Device> devices,
               const std::type_identity_t<std::function<Holder()>>& make = {})
      : module_(std::move(module)) {
    for (const at::Device& device : devices) {
      modules_.push_back(modules_.empty() ? pointer_of(module_)
                                          : replica_for(device, make));
    }
    replicas_ = std::make_shared<Replicas>(
        std::vector<Replicas::ModulePtr>(modules_.begin(), modules_.end()),
        std::move(devices));
  }

  template <typename... Args>
  auto forward(const Args&... args) {
    static_assert(!(wrappers::hides_tensors<Args> || ...),
                  "give each tensor as an argument: only those are cut");
    using Output = std::decay_t<decltype(std::declval<Module&>().forward(
        std::declval<Args&>()...))>;
    const wrappers::SliceForward on_slices = [&](size_t device,
                                                 const auto& slices) {
      size_t next = 0;
      std::tuple<Args...> own{wrappers::own_argument(args, slices, next)...};
      return wrappers::to_list(std::apply(
          [&](auto&... arg) { return modules_[device]->forward(arg...); },
          own));
    };
    return wrappers::from_list<Output>(
        wrappers::scattered_forward(replicas_, tensors_of(args...), on_slices));
  }

  Holder& module() { return module_; }
  // Bytes that moved, a device; `model` is what the star costs.
  const std::vector<wrappers::DeviceTraffic>& traffic() const {
    return replicas_->traffic();
  }
  // See Replicas::star_seconds().
  double star_seconds() const { return replicas_->star_seconds(); }

 private:
  static std::shared_ptr<Module> pointer_of(const Holder& holder) {
    if constexpr (requires { holder.ptr(); }) {
      return holder.ptr();
    } else {
      return holder;
    }
  }

  std::shared_ptr<Module> replica_for(at::Device device,
                                      const std::function<Holder()>& make) {
    const auto original = pointer_of(module_);
    if (!make)
      return std::dynamic_pointer_cast<Module>(original->clone(device));
    const auto replica = pointer_of(make());
    replica->to(device);
    return replica;
  }

  template <typename... Args>
  static std::vector<at::Tensor> tensors_of(const Args&... args) {
    std::vector<at::Tensor> tensors;
    const auto add = [&](const auto& argument) {
      if constexpr (wrappers::is_tensor<std::decay_t<decltype(argument)>>) {
        tensors.push_back(argument);
      }
    };
    (add(args), ...);
    return tensors;
  }

  Holder module_;
  std::vector<std::shared_ptr<Module>> modules_;  // [device]
  std::shared_ptr<Replicas> replicas_;
};

}  // namespace tessera
