#include "tessera/nn/grouped_linear.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "tessera/core/device.h"
#include "tessera/core/parallel.h"
#include "tessera/nn/gpu/program.h"
#include "tessera/nn/kernel_choice.h"
#include "tessera/nn/matmul.h"
#include "tessera/nn/unwritten_gradients.h"
#include "tessera/nn/weight_queue.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Multiplications from which on a second thread is worth its start.
constexpr int64_t kOfAThread = int64_t{1} << 18;

// The units of all groups, sizes[g] each, shared out among threads:
// run(g, begin, end) of every group with some. `cost`: multiplications a unit.
// Those of a device are whole, from this thread.
template <typename Run>
void share_out(const std::vector<int64_t>& sizes, int64_t cost, bool on_cpu,
               const Run& run) {
  if (!on_cpu) {
    const at::NoGradGuard no_grad;
    for (size_t g = 0; g < sizes.size(); ++g) {
      if (sizes[g] > 0) run(g, 0, sizes[g]);
    }
    return;
  }
  std::vector<int64_t> ends;
  int64_t all = 0;
  for (const int64_t size : sizes) ends.push_back(all += size);
  const int64_t grain =
      std::max<int64_t>(1, kOfAThread / std::max(cost, int64_t{1}));
  parallel_for(0, all, grain, [&](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;
    size_t g = std::ranges::upper_bound(ends, begin) - ends.begin();
    while (begin < end) {
      const int64_t first = ends[g] - sizes[g];
      const int64_t stop = std::min(end, ends[g]);
      if (stop > begin) run(g, begin - first, stop - first);
      begin = std::max(begin, stop);
      ++g;
    }
  });
}

// From Hopper on one kernel takes all groups of bf16, where rows begin at whole
// multiples of 16 bytes; before, LibTorch multiplies group by group.
bool takes_grouped(const at::Tensor& rows, const at::Tensor& weight) {
  constexpr int64_t kElements = 8;
  constexpr int kHopper = 9;
  const auto is_aligned = [](const at::Tensor& x) {
    return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  };
  return rows.is_cuda() && rows.scalar_type() == at::kBFloat16 &&
         weight.scalar_type() == at::kBFloat16 && rows.size(0) > 0 &&
         weight.size(1) % kElements == 0 && weight.size(2) % kElements == 0 &&
         uses(Kernel::kGroupedProduct) && is_aligned(rows) &&
         is_aligned(weight) && gpu::capability_of(rows) >= kHopper;
}

// Where each group ends, on the device.
at::Tensor ends_of(const std::vector<int64_t>& splits, at::Device device) {
  std::vector<int32_t> ends;
  int64_t all = 0;
  for (const int64_t count : splits) {
    ends.push_back(static_cast<int32_t>(all += count));
  }
  return sent_to(at::tensor(ends, at::kInt), device);
}

// One product for each layer, written where it belongs; or one of all.
class GroupedProduct : public torch::autograd::Function<GroupedProduct> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows,
                            const at::Tensor& weight,
                            const std::vector<int64_t>& splits) {
    const Groups groups = {splits, takes_grouped(rows, weight)
                                       ? ends_of(splits, rows.device())
                                       : at::Tensor()};
    ctx->save_for_backward({rows, weight, groups.ends});
    ctx->saved_data["splits"] = splits;
    if (weight.requires_grad()) WeightQueue::remember(ctx);
    return by_rows(rows.detach(), weight.detach().transpose(1, 2), groups);
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const Groups groups = {ctx->saved_data["splits"].toIntVector(), saved[2]};
    const at::Tensor rows = saved[0].detach(), &weight = saved[1];
    const at::Tensor d_y = gradients[0].contiguous();
    const at::Tensor d_rows = by_rows(d_y, weight.detach(), groups);
    if (const auto queue = WeightQueue::open_for(ctx)) {
      // Without what made them, which holds the queue.
      queue->add([weight, groups, d_y, rows] {
        if (!weight.grad().defined()) {
          weight.mutable_grad() = at::zeros_like(weight);
        }
        add_to_weight(weight, d_y, rows, groups);
      });
      return {d_rows, {}, {}};
    }
    if (!weight.requires_grad()) return {d_rows, {}, {}};
    if (adds_in_place(weight)) {
      add_to_weight(weight, d_y, rows, groups);
      return {d_rows, {}, {}};
    }
    const at::Tensor d_weight =
        at::zeros(weight.sizes(), weight.options().requires_grad(false));
    gradients_into(d_weight, d_y, rows, groups, /*adds=*/true);
    return {d_rows, d_weight, {}};
  }

 private:
  struct Groups {
    std::vector<int64_t> splits;
    at::Tensor ends;  // on the device, where one kernel takes all
  };

  // x B_e. x: (N, in), matrices: (E, in, out) -> (N, out).
  static at::Tensor by_rows(const at::Tensor& x, const at::Tensor& matrices,
                            const Groups& groups) {
    if (groups.ends.defined()) {
      return at::_grouped_mm(x, matrices, groups.ends);
    }
    at::Tensor y = at::empty({x.size(0), matrices.size(2)}, x.options());
    std::vector<int64_t> begins;
    int64_t all = 0;
    for (const int64_t count : groups.splits) {
      begins.push_back(all);
      all += count;
    }
    share_out(groups.splits, matrices.size(1) * matrices.size(2), y.is_cpu(),
              [&](size_t e, int64_t begin, int64_t end) {
                const auto of = [&](const at::Tensor& t) {
                  return t.narrow(0, begins[e] + begin, end - begin);
                };
                product_into(of(y), of(x), matrices[static_cast<int64_t>(e)],
                             /*adds=*/false, Sizes::kNew);
              });
    return y;
  }

  // Experts without a row have no product that would write.
  static void add_to_weight(const at::Tensor& weight, const at::Tensor& d_y,
                            const at::Tensor& rows, const Groups& groups) {
    const bool adds = !take_unwritten(weight);
    for (size_t e = 0; e < groups.splits.size() && !adds; ++e) {
      if (groups.splits[e] == 0) {
        weight.grad()[static_cast<int64_t>(e)].zero_();
      }
    }
    gradients_into(weight.grad(), d_y, rows, groups, adds);
  }

  // gradient: (E, out, in).
  static void gradients_into(const at::Tensor& gradient, const at::Tensor& d_y,
                             const at::Tensor& rows, const Groups& groups,
                             bool adds) {
    if (groups.ends.defined()) {
      const at::Tensor all = at::_grouped_mm(d_y.t(), rows, groups.ends);
      for (size_t e = 0; e < groups.splits.size(); ++e) {
        if (groups.splits[e] == 0) all[static_cast<int64_t>(e)].zero_();
      }
      adds ? gradient.add_(all) : gradient.copy_(all);
      return;
    }
    const auto& splits = groups.splits;
    const auto d_y_of = d_y.split_with_sizes(splits);
    const auto rows_of = rows.split_with_sizes(splits);
    // A share of a layer's rows stands for as large a share of its features:
    // so each unit costs the same.
    const int64_t out = gradient.size(1);
    share_out(splits, out * gradient.size(2), gradient.is_cpu(),
              [&](size_t e, int64_t begin, int64_t end) {
                const int64_t count = splits[e];
                const int64_t from = begin * out / count;
                const int64_t features = end * out / count - from;
                if (features == 0) return;
                gradient_into(
                    gradient[static_cast<int64_t>(e)].narrow(0, from, features),
                    d_y_of[e].narrow(1, from, features), rows_of[e], adds,
                    Sizes::kNew);
              });
  }
};

Role of_experts(Role role) {
  role.of_experts = true;
  return role;
}

}  // namespace

at::Tensor grouped_product(const at::Tensor& rows, const at::Tensor& weight,
                           const std::vector<int64_t>& splits) {
  return GroupedProduct::apply(rows, weight, splits);
}

GroupedLinear::GroupedLinear(int64_t experts, const LinearOptions& options)
    : weight_(declare_parameter("weight", {experts, options.out, options.in},
                                Init::normal(options.init_std),
                                of_experts(options.role))) {}

}  // namespace tessera::nn
