#include "tessera/comm/base/histories.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <utility>
#include <vector>

#include "tessera/comm/base/c10d_reduce_op.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"

namespace tessera::comm {
namespace {

constexpr uint64_t kEvery = 128;

}  // namespace

Histories::Histories(c10::intrusive_ptr<c10d::Backend> backend)
    : backend_(std::move(backend)) {}

void Histories::add(const Operation& operation) {
  hash_ = operation.signature(hash_);
  waits_ = std::exchange(compares_next_, false);
  if (++collectives_ % kEvery == 0 || waits_) compare();
}

void Histories::compare() {
  const auto hash = static_cast<int64_t>(hash_);
  std::vector<at::Tensor> tensors = {at::tensor({hash, ~hash})};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d_op_of(ReduceOp::kMax);
  options.asyncOp = true;
  auto work = backend_->allreduce(tensors, options);
  under_way_.push_back({.collectives = collectives_,
                        .largest = tensors.front(),
                        .work = std::move(work)});
}

void Histories::wait() {
  for (const Comparison& each : under_way_) {
    try {
      each.work->wait();
    } catch (const std::exception& error) {  // check() passes it over
      log::debug("a comparison of calls failed: ", message_of(error));
    }
  }
}

// One that failed tells nothing: what it failed of, the ranks hear elsewhere.
void Histories::check() {
  if (std::exchange(waits_, false)) wait();
  while (!under_way_.empty() && under_way_.front().work->isCompleted()) {
    const Comparison done = std::move(under_way_.front());
    under_way_.pop_front();
    if (!done.work->isSuccess()) continue;
    // The largest of the complements is that of the smallest.
    const int64_t* largest = done.largest.const_data_ptr<int64_t>();
    if (largest[0] == ~largest[1]) continue;
    throw RanksDiffer(
        {__func__, __FILE__, __LINE__},
        c10::str("the ranks disagree: their first ", done.collectives,
                 " collectives on this group are not the same. "
                 "TORCH_DISTRIBUTED_DEBUG=DETAIL compares each "
                 "before it begins"));
  }
}

}  // namespace tessera::comm
