#include "tessera/wrappers/detail/gradient_cycle.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "tessera/comm/flat_gradients.h"

namespace tessera::wrappers {
namespace {

// Thrown in the thread alone, when nobody waits for its work any more.
struct Dropped : std::exception {};

}  // namespace

GradientCycle::GradientCycle(std::vector<at::Tensor> parameters,
                             comm::Group& group,
                             const DistributedOptimizerOptions& options)
    : parameters_(std::move(parameters)),
      group_(group),
      options_(options),
      context_(rank_context()),
      states_(parameters_.size(), State::kAwaited),
      thread_([this] { run(); }) {}

GradientCycle::~GradientCycle() {
  {
    std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void GradientCycle::set_ready(size_t parameter) {
  {
    std::lock_guard lock(mutex_);
    states_[parameter] = State::kReady;
    has_news_ = true;
  }
  changed_.notify_all();
}

void GradientCycle::finish() {
  std::unique_lock lock(mutex_);
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (states_[p] != State::kAwaited) continue;
    states_[p] =
        parameters_[p].grad().defined() ? State::kReady : State::kLacking;
  }
  has_news_ = true;
  changed_.notify_all();
  changed_.wait(lock,
                [&] { return failure_ || num_reduced_ == parameters_.size(); });
  if (failure_) std::rethrow_exception(failure_);
  std::fill(states_.begin(), states_.end(), State::kAwaited);
  num_reduced_ = 0;
  // Else a cycle would begin that has nothing, and after the last step one that
  // other ranks never begin.
  has_news_ = false;
}

void GradientCycle::run() {
  const RankContextGuard guard(context_);
  const at::NoGradGuard no_grad;
  try {
    loop();
  } catch (const Dropped&) {
    return;
  } catch (const std::exception&) {
    std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
  }
  changed_.notify_all();
}

bool GradientCycle::is_all_ready() const {
  return std::count(states_.begin(), states_.end(), State::kAwaited) == 0;
}

bool GradientCycle::may_begin() const {
  return num_reduced_ < parameters_.size() && (has_news_ || is_all_ready());
}

void GradientCycle::loop() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || may_begin(); });
      changed_.wait_for(lock, options_.cycle_time,
                        [&] { return ends_ || is_all_ready(); });
    }
    if (ends_) return;
    const std::vector<size_t> agreed = agree();
    reduce(agreed);
    {
      std::lock_guard lock(mutex_);
      for (size_t p : agreed) states_[p] = State::kReduced;
      num_reduced_ += agreed.size();
    }
    changed_.notify_all();
  }
}

// The parameters that are ready on all ranks and not reduced yet; those whose
// gradient all ranks lack are reduced with that.
std::vector<size_t> GradientCycle::agree() {
  const auto count = static_cast<int64_t>(parameters_.size());
  at::Tensor flags = at::empty({2 * count}, at::kByte);
  auto* ready = flags.data_ptr<uint8_t>();
  uint8_t* lacking = ready + count;
  {
    std::lock_guard lock(mutex_);
    has_news_ = false;
    for (int64_t p = 0; p < count; ++p) {
      ready[p] = states_[p] != State::kAwaited ? 1 : 0;
      lacking[p] = states_[p] == State::kLacking ? 1 : 0;
    }
  }
  comm::Work work = group_.all_reduce(flags, comm::ReduceOp::kMin);
  await(work);
  std::vector<size_t> agreed;
  std::lock_guard lock(mutex_);
  for (int64_t p = 0; p < count; ++p) {
    if (!ready[p] || states_[p] == State::kReduced) continue;
    if (!lacking[p]) {
      agreed.push_back(p);
      continue;
    }
    states_[p] = State::kReduced;
    ++num_reduced_;
  }
  return agreed;
}

std::vector<GradientCycle::Buffer> GradientCycle::buffers_of(
    std::vector<size_t> parameters) const {
  const auto type_of = [](const at::Tensor& p) { return p.scalar_type(); };
  std::stable_sort(parameters.begin(), parameters.end(),
                   [&](size_t a, size_t b) {
                     return type_of(parameters_[a]) < type_of(parameters_[b]);
                   });
  std::vector<Buffer> buffers;
  for (auto& bucket : comm::cut_into_buckets(parameters_, parameters, type_of,
                                             options_.fusion_threshold)) {
    buffers.push_back({.parameters = std::move(bucket)});
  }
  return buffers;
}

void GradientCycle::reduce(const std::vector<size_t>& parameters) {
  std::vector<Buffer> buffers = buffers_of(parameters);
  const auto op = options_.mean ? comm::ReduceOp::kMean : comm::ReduceOp::kSum;
  for (Buffer& buffer : buffers) {
    fill(buffer);
    buffer.work = group_.all_reduce(buffer.data, op);
    ++num_reductions_;
  }
  for (Buffer& buffer : buffers) {
    await(buffer.work);
    empty(buffer);
  }
}

// Its gradient, which counts as zero where this rank lacks it. Only bytes are
// written: kernels of LibTorch would start a team of threads for this one.
at::Tensor GradientCycle::gradient_of(size_t parameter) {
  at::Tensor& gradient = parameters_[parameter].mutable_grad();
  if (!gradient.defined()) {
    gradient = at::empty(parameters_[parameter].sizes(),
                         parameters_[parameter].options());
    std::memset(gradient.data_ptr(), 0, gradient.nbytes());
  }
  return gradient;
}

void GradientCycle::fill(Buffer& buffer) {
  if (buffer.parameters.size() == 1) {
    buffer.data = gradient_of(buffer.parameters[0]);
    return;
  }
  int64_t numel = 0;
  for (size_t p : buffer.parameters) numel += parameters_[p].numel();
  buffer.data = at::empty({numel}, parameters_[buffer.parameters[0]].options());
  auto* to = static_cast<char*>(buffer.data.data_ptr());
  for (size_t p : buffer.parameters) {
    const at::Tensor gradient = gradient_of(p);
    std::memcpy(to, gradient.const_data_ptr(), gradient.nbytes());
    to += gradient.nbytes();
  }
}

void GradientCycle::empty(const Buffer& buffer) {
  if (buffer.parameters.size() == 1) return;
  const auto* from = static_cast<const char*>(buffer.data.const_data_ptr());
  for (size_t p : buffer.parameters) {
    const at::Tensor gradient = gradient_of(p);
    std::memcpy(gradient.data_ptr(), from, gradient.nbytes());
    from += gradient.nbytes();
  }
}

// Looks again and again, for a peer that never comes must not hold up the end.
void GradientCycle::await(comm::Work& work) const {
  constexpr int kYields = 200;
  constexpr auto kNap = std::chrono::microseconds(50);
  for (int looks = 0; !work.done(); ++looks) {
    if (ends_) throw Dropped();
    if (looks < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
  work.synchronize();
}

}  // namespace tessera::wrappers
