#include "tessera/comm/base/staged_group.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

#include "tessera/comm/base/keep_for_ever.h"
#include "tessera/core/device.h"

namespace tessera::comm {
namespace {

// Of an operation, on the host: alive as long as the backend may use them.
struct Staged {
  at::Tensor sent, came;
};

struct StagedWork final : Work::Impl {
  Work on_host;
  std::unique_ptr<Staged> staged;
  at::Tensor to;  // what came goes there

  StagedWork() = default;
  ~StagedWork() override {
    if (!on_host.done()) keep_for_ever(staged.release());
  }
  StagedWork(const StagedWork&) = delete;
  StagedWork& operator=(const StagedWork&) = delete;

  void wait() override {
    on_host.wait();
    if (!staged->came.defined()) return;
    const at::NoGradGuard no_grad;
    to.copy_(std::exchange(staged->came, {}));
  }
  bool done() const override { return on_host.done(); }
};

// Blocks until the device has computed it.
at::Tensor on_host(const at::Tensor& tensor) {
  return host_memory_for(tensor).copy_(tensor.detach());
}

// `sent` and what `came` for `to`, which may be not defined.
Work staged(Work on_host, at::Tensor sent, at::Tensor came, at::Tensor to,
            Mode mode) {
  auto work = std::make_shared<StagedWork>();
  work->on_host = std::move(on_host);
  work->staged =
      std::make_unique<Staged>(Staged{std::move(sent), std::move(came)});
  work->to = std::move(to);
  if (mode == Mode::kBlocking) work->wait();
  return Work(std::move(work));
}

}  // namespace

// The backend moves it, or refuses it by name: there is nothing of a meta one.
bool StagedGroup::is_plain(const at::Tensor& tensor) const {
  return carries(tensor) || tensor.is_meta();
}

Work StagedGroup::all_reduce(at::Tensor tensor, ReduceOp op, Mode mode) {
  if (is_plain(tensor))
    return BackendGroup::all_reduce(std::move(tensor), op, mode);
  const at::Tensor here = on_host(tensor);
  return staged(BackendGroup::all_reduce(here, op, mode), {}, here, tensor,
                mode);
}

Work StagedGroup::all_gather(at::Tensor output, at::Tensor input, Mode mode) {
  if (is_plain(output)) {
    return BackendGroup::all_gather(std::move(output), std::move(input), mode);
  }
  const at::Tensor here = host_memory_for(output), sent = on_host(input);
  return staged(BackendGroup::all_gather(here, sent, mode), sent, here, output,
                mode);
}

Work StagedGroup::reduce_scatter(at::Tensor output, at::Tensor input,
                                 ReduceOp op, Mode mode) {
  if (is_plain(output)) {
    return BackendGroup::reduce_scatter(std::move(output), std::move(input), op,
                                        mode);
  }
  const at::Tensor here = host_memory_for(output), sent = on_host(input);
  return staged(BackendGroup::reduce_scatter(here, sent, op, mode), sent, here,
                output, mode);
}

Work StagedGroup::all_to_all(at::Tensor output, at::Tensor input,
                             std::vector<int64_t> output_splits,
                             std::vector<int64_t> input_splits, Mode mode) {
  if (is_plain(output)) {
    return BackendGroup::all_to_all(std::move(output), std::move(input),
                                    std::move(output_splits),
                                    std::move(input_splits), mode);
  }
  const at::Tensor here = host_memory_for(output), sent = on_host(input);
  return staged(BackendGroup::all_to_all(here, sent, std::move(output_splits),
                                         std::move(input_splits), mode),
                sent, here, output, mode);
}

Work StagedGroup::broadcast(at::Tensor tensor, int64_t root, Mode mode) {
  if (is_plain(tensor))
    return BackendGroup::broadcast(std::move(tensor), root, mode);
  const at::Tensor here =
      root == rank() ? on_host(tensor) : host_memory_for(tensor);
  return staged(BackendGroup::broadcast(here, root, mode), {}, here, tensor,
                mode);
}

Work StagedGroup::send(at::Tensor tensor, int64_t peer, int64_t tag) {
  if (is_plain(tensor)) return BackendGroup::send(std::move(tensor), peer, tag);
  const at::Tensor sent = on_host(tensor);
  return staged(BackendGroup::send(sent, peer, tag), sent, {}, {},
                Mode::kAsync);
}

Work StagedGroup::recv(at::Tensor tensor, int64_t peer, int64_t tag) {
  if (is_plain(tensor)) return BackendGroup::recv(std::move(tensor), peer, tag);
  const at::Tensor here = host_memory_for(tensor);
  return staged(BackendGroup::recv(here, peer, tag), {}, here, tensor,
                Mode::kAsync);
}

}  // namespace tessera::comm
