#include "tessera/nn/grouped_linear.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "tessera/core/device.h"
#include "tessera/core/host_read.h"
#include "tessera/core/parallel.h"
#include "tessera/nn/detail/second_derivatives.h"
#include "tessera/nn/gpu/one_pass.h"
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

// Whether one kernel takes all groups: on a GPU from Hopper on, of bf16, where
// rows begin at whole multiples of 16 bytes; before, LibTorch multiplies group
// by group. The device of tests has it, to go the same way.
bool takes_grouped(const at::Tensor& rows, const at::Tensor& weight) {
  constexpr int64_t kElements = 8;
  constexpr int kHopper = 9;
  if (rows.is_cpu() || rows.scalar_type() != at::kBFloat16 ||
      weight.scalar_type() != at::kBFloat16 || rows.size(0) == 0 ||
      weight.size(1) % kElements != 0 || weight.size(2) % kElements != 0 ||
      !uses(Kernel::kGroupedProduct)) {
    return false;
  }
  if (!rows.is_cuda()) return true;
  const auto is_aligned = [](const at::Tensor& x) {
    return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  };
  return is_aligned(rows) && is_aligned(weight) &&
         gpu::capability_of(rows) >= kHopper;
}

// gradient (E, out, in) += `all`, or = where nothing is there yet, of layers
// with rows; for others the kernel that made `all` has written nothing.
void take_gradients(const at::Tensor& gradient, const at::Tensor& all,
                    const at::Tensor& ends, bool adds) {
  if (gpu::runs(all) && gradient.scalar_type() == at::kFloat &&
      gradient.is_contiguous() && all.is_contiguous()) {
    return gpu::take_groups(gradient, all, ends, adds);
  }
  const at::Tensor zero = at::zeros({1}, ends.options());
  const at::Tensor is_empty = at::diff(ends, /*n=*/1, /*dim=*/0, zero) == 0;
  all.masked_fill_(is_empty.view({-1, 1, 1}), 0);
  adds ? gradient.add_(all) : gradient.copy_(all);
}

// One product for each layer, written where it belongs; or one of all.
class GroupedProduct : public torch::autograd::Function<GroupedProduct> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows,
                            const at::Tensor& weight, const RowGroups& groups) {
    const Way way = {groups, takes_grouped(rows, weight)};
    ctx->save_for_backward({rows, weight});
    ctx->saved_data["way"] =
        c10::IValue::make_capsule(c10::make_intrusive<Held>(way));
    if (weight.requires_grad()) WeightQueue::remember(ctx);
    return by_rows(rows.detach(), weight.detach().transpose(1, 2), way);
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    detail::refuse_second_derivatives("A product of experts");
    const auto saved = ctx->get_saved_variables();
    const Way way = c10::static_intrusive_pointer_cast<Held>(
                        ctx->saved_data["way"].toCapsule())
                        ->way;
    const at::Tensor rows = saved[0].detach(), &weight = saved[1];
    const at::Tensor d_y = gradients[0].contiguous();
    at::Tensor d_rows;
    if (ctx->needs_input_grad(0)) d_rows = by_rows(d_y, weight.detach(), way);
    if (!ctx->needs_input_grad(1)) return {d_rows, {}, {}};
    if (const auto queue = WeightQueue::open_for(ctx)) {
      // Without what made them, which holds the queue.
      queue->add([weight, way, d_y, rows] {
        if (!weight.grad().defined()) {
          weight.mutable_grad() = at::zeros_like(weight);
        }
        add_to_weight(weight, d_y, rows, way);
      });
      return {d_rows, {}, {}};
    }
    if (adds_in_place(weight)) {
      add_to_weight(weight, d_y, rows, way);
      return {d_rows, {}, {}};
    }
    const at::Tensor d_weight =
        at::zeros(weight.sizes(), weight.options().requires_grad(false));
    gradients_into(d_weight, d_y, rows, way, /*adds=*/true);
    return {d_rows, d_weight, {}};
  }

 private:
  struct Way {
    RowGroups groups;
    bool at_once;  // one kernel takes all
    const at::Tensor& ends(const at::Tensor& rows) const {
      return groups.ends_on(rows.device());
    }
  };
  struct Held : torch::CustomClassHolder {
    explicit Held(const Way& of) : way(of) {}
    Way way;
  };

  // x B_e. x: (N, in), matrices: (E, in, out) -> (N, out).
  static at::Tensor by_rows(const at::Tensor& x, const at::Tensor& matrices,
                            const Way& way) {
    if (way.at_once) return at::_grouped_mm(x, matrices, way.ends(x));
    at::Tensor y = at::empty({x.size(0), matrices.size(2)}, x.options());
    const auto& sizes = way.groups.sizes();
    std::vector<int64_t> begins(sizes.size());
    std::exclusive_scan(sizes.begin(), sizes.end(), begins.begin(), int64_t{0});
    share_out(sizes, matrices.size(1) * matrices.size(2), y.is_cpu(),
              [&](size_t e, int64_t begin, int64_t end) {
                const auto of = [&](const at::Tensor& t) {
                  return t.narrow(0, begins[e] + begin, end - begin);
                };
                product_into(of(y), of(x), matrices[static_cast<int64_t>(e)],
                             /*adds=*/false, Sizes::kNew);
              });
    return y;
  }

  static void add_to_weight(const at::Tensor& weight, const at::Tensor& d_y,
                            const at::Tensor& rows, const Way& way) {
    const bool adds = !take_unwritten(weight);
    if (!adds && !way.at_once) {  // those without a row have no product
      const auto& sizes = way.groups.sizes();
      for (size_t e = 0; e < sizes.size(); ++e) {
        if (sizes[e] == 0) weight.grad()[static_cast<int64_t>(e)].zero_();
      }
    }
    gradients_into(weight.grad(), d_y, rows, way, adds);
  }

  // gradient: (E, out, in).
  static void gradients_into(const at::Tensor& gradient, const at::Tensor& d_y,
                             const at::Tensor& rows, const Way& way,
                             bool adds) {
    if (way.at_once) {
      const at::Tensor& ends = way.ends(rows);
      return take_gradients(gradient, at::_grouped_mm(d_y.t(), rows, ends),
                            ends, adds);
    }
    const auto& sizes = way.groups.sizes();
    const auto d_y_of = d_y.split_with_sizes(sizes);
    const auto rows_of = rows.split_with_sizes(sizes);
    // A share of a layer's rows stands for as large a share of its features:
    // so each unit costs the same.
    const int64_t out = gradient.size(1);
    share_out(sizes, out * gradient.size(2), gradient.is_cpu(),
              [&](size_t e, int64_t begin, int64_t end) {
                const int64_t count = sizes[e];
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

struct RowGroups::Known {
  std::optional<int64_t> rows;
  std::optional<std::vector<int64_t>> sizes;
  at::Tensor counts;  // where `sizes` are not known from the start
  at::Tensor ends;    // once they are asked for
};

RowGroups::RowGroups(std::vector<int64_t> sizes)
    : known_(std::make_shared<Known>()) {
  known_->rows = std::reduce(sizes.begin(), sizes.end());
  known_->sizes = std::move(sizes);
}

RowGroups::RowGroups(const at::Tensor& counts, std::optional<int64_t> rows)
    : known_(std::make_shared<Known>()) {
  known_->rows = rows;
  known_->counts = counts;
}

int64_t RowGroups::rows() const {
  if (!known_->rows) {
    known_->rows = std::reduce(sizes().begin(), sizes().end());
  }
  return *known_->rows;
}

const std::vector<int64_t>& RowGroups::sizes() const {
  if (!known_->sizes) {
    const at::Tensor here = read_on_host(known_->counts);
    const int64_t* first = here.const_data_ptr<int64_t>();
    known_->sizes = std::vector<int64_t>(first, first + here.numel());
  }
  return *known_->sizes;
}

const at::Tensor& RowGroups::ends_on(at::Device device) const {
  at::Tensor& ends = known_->ends;
  if (ends.defined() && ends.device() == device) return ends;
  const at::Tensor counts = known_->counts.defined()
                                ? known_->counts
                                : at::tensor(*known_->sizes, at::kLong);
  ends = sent_to(counts.cumsum(/*dim=*/0, at::kInt), device);
  return ends;
}

at::Tensor grouped_product(const at::Tensor& rows, const at::Tensor& weight,
                           const RowGroups& groups) {
  return GroupedProduct::apply(rows, weight, groups);
}

GroupedLinear::GroupedLinear(int64_t experts, const LinearOptions& options)
    : weight_(declare_parameter("weight", {experts, options.out, options.in},
                                Init::normal(options.init_std),
                                of_experts(options.role))) {}

}  // namespace tessera::nn
