#include "tessera/wrappers/detail/gradient_reducer.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/core/units.h"
#include "tessera/wrappers/detail/backward.h"

namespace tessera::wrappers {
namespace {

constexpr int64_t kActive = 0;  // places in a bucket's extra elements
constexpr int64_t kMissing = 1;
constexpr int64_t kExtra = 2;

constexpr size_t kNamedAtMost = 8;  // parameters in one message

// Gradients of half-precision parameters are summed in fp32, over micro-batches
// and over ranks.
at::ScalarType gradient_dtype(const at::Tensor& parameter) {
  const auto dtype = parameter.scalar_type();
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

}  // namespace

GradientReducer::GradientReducer(const std::vector<NamedParameter>& parameters,
                                 comm::Group& group,
                                 const DistributedDataParallelOptions& options)
    : group_(group), options_(options), active_ranks_(group.size()) {
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
    hooks_.add(parameters_[i], [this, i] { on_gradient(i); });
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

void GradientReducer::prepare() {
  TS_CHECK(!armed_,
           "data parallel: the backward before this forward did not end, and "
           "its gradients were not reduced: ranks would go on with different "
           "parameters.");
  TS_CHECK(hooks_.are_heard(),
           "data parallel: parameters got other memory, dtype or device since "
           "the module was wrapped, by torch::load(), to() or set_data(), and "
           "their gradients would not be reduced. Wrap the module after moving "
           "it; tessera::load() (wrappers/load.h) reads into the memory that "
           "it has.");
  const auto is_gone = [](const at::Tensor& parameter) {
    return !parameter.grad().defined();
  };
  // By zero_grad(): with their views back, gradients need not be copied.
  if (at::GradMode::is_enabled() && std::ranges::all_of(parameters_, is_gone)) {
    zero();
  }
}

void GradientReducer::zero() {
  for (auto& bucket : buckets_) bucket.gradients.zero();
  touched_.assign(parameters_.size(), false);
  holds_means_ = false;
}

void GradientReducer::accumulate(const at::Tensor& loss) {
  if (holds_means_) zero();
  accumulates_ = true;
  const auto ends = c10::make_scope_exit([this] { accumulates_ = false; });
  run_backward({loss});
}

void GradientReducer::backward(const at::Tensor& loss) {
  if (holds_means_) zero();
  arm();
  run_backward({loss});
  finish_backward();
}

void GradientReducer::arm() {
  armed_ = true;
  next_bucket_ = 0;
  ready_.assign(parameters_.size(), false);
  ready_order_.clear();
  for (auto& bucket : buckets_) bucket.pending = bucket.items.size();
}

void GradientReducer::on_gradient(size_t item) {
  touched_[item] = true;
  if (accumulates_) return;
  if (!armed_) {  // the loss's own backward()
    arm();
    torch::autograd::Engine::get_default_engine().queue_callback(
        [this] { finish_backward(); });
  }
  if (ready_[item]) {  // by a backward inside of this one
    TS_CHECK(places_[item].bucket >= next_bucket_,
             "data parallel: ", names_[item],
             " got one more gradient in the same backward, while the first was "
             "being summed over the ranks already: a part that recompute() "
             "has more than once gives one each time. Set overlap to false, "
             "which sums behind the backward.");
    return;
  }
  adopt(item);
  ready_[item] = true;
  ready_order_.push_back(static_cast<int64_t>(item));
  --buckets_[places_[item].bucket].pending;
  if (options_.overlap) issue_full_buckets();
}

// A gradient outside its bucket would be left out of the sum: zero_grad() made
// autograd begin another.
void GradientReducer::adopt(size_t item) {
  const at::Tensor& gradient = parameters_[item].grad();
  TS_CHECK(!gradient.defined() ||
               (gradient.layout() == at::kStrided && !gradient.requires_grad()),
           "data parallel: the gradient of ", names_[item],
           " is sparse or has a graph of its own (create_graph); it must be "
           "dense and without one.");
  const Place& place = places_[item];
  buckets_[place.bucket].gradients.adopt(place.item);
}

void GradientReducer::issue_full_buckets() {
  while (next_bucket_ < buckets_.size() &&
         buckets_[next_bucket_].pending == 0) {
    issue(/*active=*/true);
  }
}

void GradientReducer::issue(bool active) {
  Bucket& bucket = buckets_[next_bucket_++];
  for (size_t item : bucket.items) {
    if (!ready_[item]) adopt(item);  // of an accumulate() too
  }
  const at::NoGradGuard no_grad;
  at::Tensor extra = bucket.gradients.extra();
  const auto missing =
      std::count_if(bucket.items.begin(), bucket.items.end(),
                    [this](size_t item) { return !touched_[item]; });
  extra[kActive].fill_(active ? 1 : 0);
  extra[kMissing].fill_(active ? missing : 0);
  bucket.gradients.begin_all_reduce(group_);
}

GradientReducer::Found GradientReducer::finish(bool active) {
  Found found;
  for (size_t i = 0; active && i < names_.size(); ++i) {
    if (!touched_[i]) found.missing_here.push_back(names_[i]);
  }
  while (next_bucket_ < buckets_.size()) issue(active);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> extras;
  for (auto& bucket : buckets_) {
    bucket.gradients.await_all_reduce();
    extras.push_back(bucket.gradients.extra().to(at::kDouble));
  }
  if (!extras.empty()) {
    const at::Tensor all = read_on_host(at::stack(extras));
    found.active_ranks = all[0][kActive].item<int64_t>();
    found.missing_gradients = all.select(1, kMissing).sum().item<int64_t>();
  }
  active_ranks_ = found.active_ranks;
  for (auto& bucket : buckets_) {
    if (found.active_ranks > 1) {
      bucket.gradients.flat().div_(found.active_ranks);
    }
  }
  armed_ = false;
  holds_means_ = true;
  touched_.assign(parameters_.size(), false);
  ++num_reductions_;
  if (!order_is_known_) adopt_order_of_rank_0();
  return found;
}

void GradientReducer::finish_backward() {
  const Found found = finish(/*active=*/true);
  if (options_.allow_unused) return;
  TS_CHECK(found.missing_here.empty(), "data parallel: no gradient came for ",
           some_of(found.missing_here, kNamedAtMost),
           ". Every parameter must take part in the loss; freeze it "
           "(requires_grad_(false)) before the module is wrapped, or set "
           "allow_unused, which makes its gradient zero.");
  TS_CHECK(found.missing_gradients == 0,
           "data parallel: ", found.missing_gradients,
           " gradients were missing on other ranks, which name them.");
}

int64_t GradientReducer::stand_by() {
  zero();
  arm();
  return finish(/*active=*/false).active_ranks;
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
  group_.broadcast(order, /*root=*/0).synchronize();
  if (order[0].item<int64_t>() < 0) return;
  const int64_t* first = order.const_data_ptr<int64_t>();
  lay_out({first, first + n});
}

}  // namespace tessera::wrappers
