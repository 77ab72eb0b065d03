#include "tessera/train/step_trace.h"

#include <ATen/ATen.h>

#include <chrono>
#include <cmath>

#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/engine/recorder.h"

namespace tessera::train {
namespace {

template <typename Write>
void or_warn(const Write& write) {
  try {
    write();
  } catch (const Error& error) {
    log::warning("no trace of this run: ", message_of(error));
  }
}

// By how much the first rank's monotonic clock is ahead of this one's, as far
// as the hosts' times of day agree: to a thousandth of a second.
double clock_ahead_s(comm::Communicator& ranks) {
  const auto since = [](auto time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
  };
  const double own = since(std::chrono::system_clock::now()) -
                     since(std::chrono::steady_clock::now());
  const at::Tensor first = at::tensor({own}, at::kDouble);
  ranks.world().broadcast(first, 0).synchronize();
  return std::round((own - first.item<double>()) * 1e3) / 1e3;
}

}  // namespace

void StepTrace::open(const mesh::DeviceMesh& mesh) {
  writer_ = std::make_unique<monitor::TraceWriter>(
      folder_.trace(), ranks_.rank(), mesh.describe(ranks_.rank()),
      engine::Recorder::lanes(), clock_ahead_s(ranks_));
}

void StepTrace::add(int64_t number, const mesh::DeviceMesh& mesh,
                    const std::vector<monitor::Span>& spans) {
  if (number < 2 || number > config_.monitor.trace + 1) return;
  if (!writer_) open(mesh);
  writer_->add(spans);
  if (number > config_.monitor.trace) finish();
}

void StepTrace::finish() {
  if (!writer_) return;
  or_warn([&] { writer_->write(); });
  writer_.reset();
  ranks_.world().barrier();
  if (ranks_.rank() != 0) return;
  or_warn([&] { monitor::merge_traces(folder_.trace(), ranks_.world_size()); });
}

}  // namespace tessera::train
