#include "tessera/wrappers/detail/gradient_reducer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "tessera/core/error.h"

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

}  // namespace

GradientReducer::GradientReducer(const std::vector<NamedParameter>& parameters,
                                 comm::Group& group,
                                 const ReducerOptions& options)
    : group_(group), options_(options) {
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.requires_grad()) continue;
    names_.push_back(name);
    parameters_.push_back(parameter);
  }
  std::vector<size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  lay_out(order);
  touched_.assign(parameters_.size(), false);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    hooks_.add(parameters_[i], [this, i] { on_ready(i); });
  }
}

// Cuts the parameters, in `order`, into buckets, and moves their gradients.
void GradientReducer::lay_out(const std::vector<size_t>& order) {
  const auto cut = comm::cut_into_buckets(parameters_, order, gradient_dtype,
                                          options_.bucket_bytes);
  buckets_.clear();
  places_.resize(parameters_.size());
  for (const auto& items : cut) {
    std::vector<at::Tensor> own;
    for (size_t item : items) {
      places_[item] = {.bucket = buckets_.size(), .item = own.size()};
      own.push_back(parameters_[item]);
    }
    const at::ScalarType dtype = gradient_dtype(own[0]);
    buckets_.push_back({.items = items,
                        .gradients = comm::FlatGradients(std::move(own), dtype,
                                                         kExtra, &group_)});
  }
}

void GradientReducer::zero() {
  for (auto& bucket : buckets_) bucket.gradients.zero();
  touched_.assign(parameters_.size(), false);
}

void GradientReducer::arm() {
  armed_ = true;
  next_bucket_ = 0;
  ready_.assign(parameters_.size(), false);
  ready_order_.clear();
  for (auto& bucket : buckets_) bucket.pending = bucket.items.size();
}

void GradientReducer::on_ready(size_t item) {
  touched_[item] = true;
  if (!armed_ || ready_[item]) return;
  check_in_place(item);
  ready_[item] = true;
  ready_order_.push_back(static_cast<int64_t>(item));
  --buckets_[places_[item].bucket].pending;
  if (options_.overlap) issue_full_buckets();
}

// A gradient outside its bucket would be left out of the sum.
void GradientReducer::check_in_place(size_t item) const {
  const Place& place = places_[item];
  TS_CHECK(buckets_[place.bucket].gradients.is_in_place(place.item),
           "data parallel: the gradient of ", names_[item],
           " was replaced during the step. Zero gradients before the step's "
           "first backward, never between its micro-batches.");
}

void GradientReducer::issue_full_buckets() {
  while (next_bucket_ < buckets_.size() &&
         buckets_[next_bucket_].pending == 0) {
    issue(/*active=*/true);
  }
}

void GradientReducer::issue(bool active) {
  Bucket& bucket = buckets_[next_bucket_++];
  const at::NoGradGuard no_grad;
  at::Tensor extra = bucket.gradients.extra();
  const auto missing =
      std::count_if(bucket.items.begin(), bucket.items.end(),
                    [this](size_t item) { return !touched_[item]; });
  extra[kActive].fill_(active ? 1 : 0);
  extra[kMissing].fill_(active ? missing : 0);
  bucket.gradients.begin_all_reduce(group_);
}

ReducedStep GradientReducer::finish(bool active) {
  TORCH_INTERNAL_ASSERT(armed_, "finish() without arm()");
  if (!active) zero();
  ReducedStep step;
  for (size_t i = 0; active && i < names_.size(); ++i) {
    if (!touched_[i]) step.missing_here.push_back(names_[i]);
  }
  while (next_bucket_ < buckets_.size()) issue(active);
  const at::NoGradGuard no_grad;
  for (auto& bucket : buckets_) {
    bucket.gradients.await_all_reduce();
    const at::Tensor extra = bucket.gradients.extra();
    step.active_ranks = extra[kActive].item<int64_t>();
    step.missing_gradients += extra[kMissing].item<int64_t>();
    if (step.active_ranks > 1) bucket.gradients.flat().div_(step.active_ranks);
  }
  armed_ = false;
  if (!order_is_known_) adopt_order_of_rank_0();
  return step;
}

// Once, after the first reduction: buckets in the order in which gradients
// really come. A rank without data has no order of its own; nor has any rank
// when a gradient was missing on rank 0, and the first order then stays.
void GradientReducer::adopt_order_of_rank_0() {
  order_is_known_ = true;
  if (parameters_.empty()) return;
  const auto n = static_cast<int64_t>(parameters_.size());
  if (static_cast<int64_t>(ready_order_.size()) != n) {
    ready_order_.assign(n, -1);
  }
  at::Tensor order = at::tensor(ready_order_, at::kLong);
  group_.broadcast(order, /*root=*/0).wait();
  if (order[0].item<int64_t>() < 0) return;
  const int64_t* first = order.const_data_ptr<int64_t>();
  lay_out({first, first + n});
}

}  // namespace tessera::wrappers
