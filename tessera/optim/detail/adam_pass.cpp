#include "tessera/optim/detail/adam_pass.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "tessera/core/parallel.h"
#include "tessera/nn/gpu/program.h"
#include "tessera/nn/kernel_choice.h"
#include "tessera/optim/detail/kernel_table.h"

namespace tessera::optim::detail {
namespace {

kernels::AdamNumbers numbers_of(const OptimizerConfig& config,
                                const UpdateGroup& group, Decay decay) {
  const double beta1 = config.betas[0], beta2 = config.betas[1];
  const auto step = static_cast<double>(group.step);
  const bool decoupled = decay == Decay::kDecoupled;
  return {
      .gradient_scale = group.gradient_scale,
      .decay_in_gradient = decoupled ? 0.0 : group.weight_decay,
      .kept = decoupled ? 1.0 - group.lr * group.weight_decay : 1.0,
      .beta1 = beta1,
      .beta2 = beta2,
      .of_gradient = 1.0 - beta1,
      .of_square = 1.0 - beta2,
      .step_size = group.lr / (1.0 - std::pow(beta1, step)),
      .root_scale = 1.0 / std::sqrt(1.0 - std::pow(beta2, step)),
      .eps = config.eps,
  };
}

kernels::Copy copy_of(const at::Tensor& copy) {
  if (!copy.defined()) return kernels::Copy::kNone;
  return copy.scalar_type() == at::kHalf ? kernels::Copy::kF16
                                         : kernels::Copy::kBF16;
}

// The tensors of one parameter, of which a kernel takes a range.
class Update {
 public:
  Update(const UpdateGroup& group, size_t i)
      : parameter_(group.parameters[i]),
        gradient_(readable(group.gradients[i], parameter_.scalar_type())),
        exp_avg_(group.moments[0][i]),
        exp_avg_sq_(group.moments[1][i]) {
    rounded_ = group.copies[i];
  }

  void run(const kernels::AdamNumbers& numbers, int64_t first,
           int64_t count) const {
    const auto from = [first](const at::Tensor& tensor) -> void* {
      if (!tensor.defined()) return nullptr;
      return static_cast<char*>(tensor.data_ptr()) +
             first * static_cast<int64_t>(tensor.itemsize());
    };
    table().adam(type_of(gradient_), numbers,
                 {.parameter = from(parameter_),
                  .gradient = from(gradient_),
                  .exp_avg = from(exp_avg_),
                  .exp_avg_sq = from(exp_avg_sq_),
                  .rounded = from(rounded_),
                  .copy = copy_of(rounded_)},
                 count);
  }

  // The same loop (nn/gpu/loops.cu) over all of it.
  void run_on_gpu(const kernels::AdamNumbers& numbers, const at::Tensor& scale,
                  const at::Tensor& pace) const {
    const int64_t count = parameter_.numel();
    const auto from = [](const at::Tensor& there) {
      return there.defined() ? there.const_data_ptr() : nullptr;
    };
    nn::gpu::launch("adam", gradient_, nn::gpu::blocks_for(count),
                    parameter_.data_ptr(), gradient_.const_data_ptr(),
                    exp_avg_.data_ptr(), exp_avg_sq_.data_ptr(),
                    rounded_.defined() ? rounded_.data_ptr() : nullptr, count,
                    numbers, from(scale), from(pace));
  }

 private:
  static at::Tensor readable(const at::Tensor& gradient,
                             at::ScalarType parameter) {
    const bool narrow = c10::isReducedFloatingType(gradient.scalar_type()) &&
                        parameter == at::kFloat;
    return narrow ? gradient : gradient.to(parameter);
  }

  at::Tensor parameter_, gradient_, exp_avg_, exp_avg_sq_, rounded_;
};

// On the CPU, or on a GPU that has its loop (of which there is none for fp16);
// and not left out by name.
bool runs_in_one_pass(const UpdateGroup& group) {
  if (!nn::uses(nn::Kernel::kAdamW)) return false;
  if (group.parameters.front().is_cpu()) return true;
  const auto is_fp16 = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.scalar_type() == at::kHalf;
  };
  return nn::gpu::runs(group.parameters.front()) &&
         std::ranges::all_of(group.gradients, nn::gpu::runs) &&
         std::ranges::none_of(group.gradients, is_fp16) &&
         std::ranges::none_of(group.copies, is_fp16);
}

void in_one_pass(const OptimizerConfig& config, const UpdateGroup& group,
                 Decay decay) {
  const auto numbers = numbers_of(config, group, decay);
  std::vector<Update> updates;
  std::vector<int64_t> ends;  // of each parameter, counted over all of them
  for (size_t i = 0; i < group.parameters.size(); ++i) {
    updates.emplace_back(group, i);
    const int64_t before = ends.empty() ? 0 : ends.back();
    ends.push_back(before + group.parameters[i].numel());
  }
  if (!group.parameters.front().is_cpu()) {
    for (const Update& update : updates) {
      update.run_on_gpu(numbers, group.scale_there, group.pace_there);
    }
    return;
  }
  parallel_for(
      0, ends.back(), kElementsPerPart, [&](int64_t begin, int64_t end) {
        auto i = static_cast<size_t>(std::ranges::upper_bound(ends, begin) -
                                     ends.begin());
        while (begin < end) {
          const int64_t start = i == 0 ? 0 : ends[i - 1];
          const int64_t count = std::min(end, ends[i]) - begin;
          updates[i++].run(numbers, begin - start, count);
          begin += count;
        }
      });
}

void by_libtorch(const OptimizerConfig& config, const UpdateGroup& group,
                 Decay decay) {
  // The kernel reads t from a tensor beside each parameter.
  const std::vector<at::Tensor> step(
      group.parameters.size(),
      at::full({}, static_cast<double>(group.step),
               group.parameters.front().options().dtype(at::kFloat)));
  using Fused =
      void (*)(at::TensorList, at::TensorList, at::TensorList, at::TensorList,
               at::TensorList, at::TensorList, double, double, double, double,
               double, bool, bool, const std::optional<at::Tensor>&,
               const std::optional<at::Tensor>&);
  Fused fused = &at::_fused_adam_;
  if (decay == Decay::kDecoupled) fused = &at::_fused_adamw_;
  fused(group.parameters, group.gradients, group.moments[0], group.moments[1],
        /*max_exp_avg_sqs=*/{}, step, group.lr, config.betas[0],
        config.betas[1], group.weight_decay, config.eps, /*amsgrad=*/false,
        /*maximize=*/false, /*grad_scale=*/{}, /*found_inf=*/{});
}

}  // namespace

Pace pace_of(const OptimizerConfig& config, const UpdateGroup& group,
             Decay decay) {
  const auto numbers = numbers_of(config, group, decay);
  return {numbers.kept, numbers.step_size, numbers.root_scale};
}

bool reads_there(const at::Tensor& tensor) {
  return nn::uses(nn::Kernel::kAdamW) && nn::gpu::runs(tensor);
}

void adam_update(const OptimizerConfig& config, const UpdateGroup& group,
                 Decay decay) {
  if (runs_in_one_pass(group)) return in_one_pass(config, group, decay);
  update_in_passes(group, [&](const UpdateGroup& plain) {
    by_libtorch(config, plain, decay);
  });
}

}  // namespace tessera::optim::detail
