#include "tessera/wrappers/gradient_reducer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "tessera/comm/flat_buffer.h"
#include "tessera/core/error.h"
#include "tessera/wrappers/detail/gradient_hooks.h"

namespace tessera::wrappers {
namespace {

constexpr int64_t kActive = 0;  // places in a bucket's extra elements
constexpr int64_t kMissing = 1;
constexpr int64_t kExtra = 2;

// Gradients of half-precision parameters are summed in fp32, over micro-batches
// and over ranks.
at::ScalarType gradient_dtype(const at::Tensor& parameter) {
  const auto dtype = parameter.scalar_type();
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

int64_t gradient_bytes(const at::Tensor& parameter) {
  return parameter.numel() *
         static_cast<int64_t>(c10::elementSize(gradient_dtype(parameter)));
}

struct Bucket {
  std::vector<size_t> items;  // indices of parameters
  comm::FlatBuffer buffer;
  size_t pending = 0;  // gradients still to come
  comm::Work work;
};

}  // namespace

struct GradientReducer::Impl {
  std::vector<NamedParameter> parameters;
  comm::Group& group;
  ReducerOptions options;
  GradientHooks hooks;
  std::vector<Bucket> buckets;
  std::vector<size_t> bucket_of;     // by parameter
  std::vector<bool> touched;         // by parameter: since zero()
  std::vector<bool> ready;           // by parameter: since arm()
  std::vector<int64_t> ready_order;  // as the gradients came
  bool order_is_known = false;
  bool armed = false;
  size_t next_bucket = 0;  // buckets are issued in order, alike on every rank

  Impl(std::vector<NamedParameter> named, comm::Group& on,
       const ReducerOptions& with)
      : group(on), options(with) {
    for (auto& item : named) {
      if (item.parameter.requires_grad()) parameters.push_back(std::move(item));
    }
    std::vector<int64_t> order(parameters.size());
    std::iota(order.rbegin(), order.rend(), 0);
    lay_out(order);
    touched.assign(parameters.size(), false);
    for (size_t i = 0; i < parameters.size(); ++i) {
      hooks.add(parameters[i].parameter, [this, i] { on_ready(i); });
    }
  }

  // Cuts the parameters, in `order`, into buckets, and moves their gradients.
  // The tensors behind .grad() stay the same objects, so that an optimizer may
  // hold on to them.
  void lay_out(const std::vector<int64_t>& order) {
    at::NoGradGuard no_grad;
    buckets.clear();
    int64_t room = 0;
    for (int64_t index : order) {
      const at::Tensor& parameter = parameters[index].parameter;
      const bool fits =
          !buckets.empty() && room >= gradient_bytes(parameter) &&
          gradient_dtype(parameters[buckets.back().items[0]].parameter) ==
              gradient_dtype(parameter);
      if (!fits) {
        buckets.emplace_back();
        room = options.bucket_bytes;
      }
      buckets.back().items.push_back(index);
      room -= gradient_bytes(parameter);
    }
    bucket_of.assign(parameters.size(), 0);
    for (size_t b = 0; b < buckets.size(); ++b) fill(b);
  }

  void fill(size_t b) {
    Bucket& bucket = buckets[b];
    std::vector<std::vector<int64_t>> shapes;
    for (size_t item : bucket.items) {
      bucket_of[item] = b;
      shapes.push_back(parameters[item].parameter.sizes().vec());
    }
    const at::Tensor& first = parameters[bucket.items[0]].parameter;
    bucket.buffer = comm::FlatBuffer(
        std::move(shapes), first.options().dtype(gradient_dtype(first)), kExtra,
        &group);
    for (size_t place = 0; place < bucket.items.size(); ++place) {
      at::Tensor& gradient =
          parameters[bucket.items[place]].parameter.mutable_grad();
      const at::Tensor view = bucket.buffer.view(place);
      if (gradient.defined()) {
        view.copy_(gradient);
        gradient.set_data(view);
      } else {
        gradient = view;
      }
    }
  }

  void arm() {
    armed = true;
    next_bucket = 0;
    ready.assign(parameters.size(), false);
    ready_order.clear();
    for (auto& bucket : buckets) bucket.pending = bucket.items.size();
  }

  void zero() {
    at::NoGradGuard no_grad;
    for (auto& bucket : buckets) {
      bucket.buffer.flat().zero_();
      for (size_t place = 0; place < bucket.items.size(); ++place) {
        // An optimizer's zero_grad() takes gradients away: put them back.
        at::Tensor& gradient =
            parameters[bucket.items[place]].parameter.mutable_grad();
        if (!in_place(gradient, bucket)) gradient = bucket.buffer.view(place);
      }
    }
    touched.assign(parameters.size(), false);
  }

  static bool in_place(const at::Tensor& gradient, const Bucket& bucket) {
    return gradient.defined() &&
           gradient.storage().is_alias_of(bucket.buffer.flat().storage());
  }

  void on_ready(size_t item) {
    touched[item] = true;
    if (!armed || ready[item]) return;
    check_in_place(item);
    ready[item] = true;
    ready_order.push_back(static_cast<int64_t>(item));
    --buckets[bucket_of[item]].pending;
    if (options.overlap) issue_full_buckets();
  }

  // A gradient outside its bucket would be left out of the sum.
  void check_in_place(size_t item) {
    TS_CHECK(
        in_place(parameters[item].parameter.grad(), buckets[bucket_of[item]]),
        "data parallel: the gradient of ", parameters[item].name,
        " was replaced during the step. Zero gradients before the step's "
        "first backward, never between its micro-batches.");
  }

  void issue_full_buckets() {
    while (next_bucket < buckets.size() && buckets[next_bucket].pending == 0) {
      issue(/*active=*/true);
    }
  }

  void issue(bool active) {
    Bucket& bucket = buckets[next_bucket++];
    at::NoGradGuard no_grad;
    at::Tensor extra = bucket.buffer.extra();
    const auto missing =
        std::count_if(bucket.items.begin(), bucket.items.end(),
                      [this](size_t item) { return !touched[item]; });
    extra[kActive].fill_(active ? 1 : 0);
    extra[kMissing].fill_(active ? missing : 0);
    bucket.work = group.all_reduce(bucket.buffer.flat(), comm::ReduceOp::kSum);
  }

  ReducedStep finish(bool active) {
    TORCH_INTERNAL_ASSERT(armed, "finish() without arm()");
    ReducedStep step;
    if (active) {
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (!touched[i]) step.missing_here.push_back(parameters[i].name);
      }
    }
    while (next_bucket < buckets.size()) issue(active);
    at::NoGradGuard no_grad;
    for (auto& bucket : buckets) {
      bucket.work.wait();
      const at::Tensor extra = bucket.buffer.extra();
      step.active_ranks = extra[kActive].item<int64_t>();
      step.missing_gradients += extra[kMissing].item<int64_t>();
      if (step.active_ranks > 1) {
        bucket.buffer.flat().div_(step.active_ranks);
      }
    }
    armed = false;
    if (!order_is_known) adopt_order_of_rank_0();
    return step;
  }

  // Once, after the first reduction: buckets in the order in which gradients
  // really come. A rank without data has no order of its own; nor has any rank
  // when a gradient was missing on rank 0, and the first order then stays.
  void adopt_order_of_rank_0() {
    order_is_known = true;
    if (parameters.empty()) return;
    const auto n = static_cast<int64_t>(parameters.size());
    if (static_cast<int64_t>(ready_order.size()) != n) {
      ready_order.assign(n, -1);
    }
    at::Tensor order = at::tensor(ready_order, at::kLong);
    group.broadcast(order, /*root=*/0).wait();
    if (order[0].item<int64_t>() < 0) return;
    const int64_t* first = order.const_data_ptr<int64_t>();
    lay_out({first, first + n});
  }
};

GradientReducer::GradientReducer(std::vector<NamedParameter> parameters,
                                 comm::Group& group,
                                 const ReducerOptions& options)
    : impl_(std::make_unique<Impl>(std::move(parameters), group, options)) {}

GradientReducer::~GradientReducer() = default;

void GradientReducer::zero() { impl_->zero(); }

void GradientReducer::arm() { impl_->arm(); }

ReducedStep GradientReducer::finish(bool active) {
  if (!active) impl_->zero();
  return impl_->finish(active);
}

size_t GradientReducer::num_buckets() const { return impl_->buckets.size(); }

int64_t GradientReducer::bytes() const {
  int64_t bytes = 0;
  for (const auto& bucket : impl_->buckets) {
    bytes += static_cast<int64_t>(bucket.buffer.flat().nbytes());
  }
  return bytes;
}

}  // namespace tessera::wrappers
