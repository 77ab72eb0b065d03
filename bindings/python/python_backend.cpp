#include "bindings/python/python_backend.h"

#include <ATen/record_function.h>
#include <Python.h>

#include <memory>
#include <mutex>
#include <utility>

#include "bindings/python/callback_threads.h"
#include "tessera/core/error.h"

namespace tessera::python {
namespace {

using Tensors = PythonBackend::Tensors;
using Pending = PythonBackend::Pending;
using c10::ivalue::Future;

// `error`, with the name of the operation that it ended.
std::exception_ptr with_context(const std::exception_ptr& error,
                                const std::string& context) {
  if (!error) return nullptr;
  try {
    std::rethrow_exception(error);
  } catch (const c10::DistBackendError& failure) {
    try {
      C10_THROW_ERROR(DistBackendError, context + message_of(failure));
    } catch (const c10::Error&) {
      return std::current_exception();
    }
  } catch (const Error& failure) {
    return std::make_exception_ptr(
        Error(failure.exit_code(), context + message_of(failure)));
  } catch (const std::exception&) {
    return error;
  }
}

// The Work of an operation as Python sees it.
class PythonWork : public c10d::Work {
 public:
  PythonWork(Pending work, int rank, const char* title, const Tensors& inputs,
             std::function<std::string()> context,
             std::shared_ptr<CallbackThreads> threads)
      : Work(rank, work->retrieveOpType(), at::hasCallbacks() ? title : nullptr,
             inputs),
        work_(std::move(work)),
        context_(std::move(context)),
        threads_(std::move(threads)),
        level_(CallbackThreads::level_here()) {}

  // Ends the event of a profiler with the operation.
  static void watch(const c10::intrusive_ptr<PythonWork>& self) {
    if (!self->recordFunctionEndCallback_) return;
    self->work_->getFuture()->addCallback(
        [self](Future&) { self->recordFunctionEndCallback_(); });
  }

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override {
    const auto error = work_->exception();
    return error ? with_context(error, context_()) : nullptr;
  }
  int sourceRank() const override { return work_->sourceRank(); }
  Tensors result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }

  bool wait(std::chrono::milliseconds timeout) override {
    try {
      return work_->wait(timeout);
    } catch (const std::exception&) {
      std::rethrow_exception(
          with_context(std::current_exception(), context_()));
    }
  }

  c10::intrusive_ptr<Future> getFuture() override {
    std::lock_guard lock(making_future_);
    if (!future_) future_ = completed_elsewhere();
    return future_;
  }

 private:
  c10::intrusive_ptr<Future> completed_elsewhere() const {
    const auto inner = work_->getFuture();
    auto outer = c10::make_intrusive<Future>(inner->elementType());
    inner->addCallback([outer, context = context_, threads = threads_,
                        level = level_](Future& done) {
      auto error = done.hasError()
                       ? with_context(done.exception_ptr(), context())
                       : nullptr;
      auto value = done.hasError() ? c10::IValue() : done.value();
      threads->run(level, [outer, error, value] {
        error ? outer->setError(error) : outer->markCompleted(value);
      });
    });
    return outer;
  }

  Pending work_;
  std::function<std::string()> context_;
  std::shared_ptr<CallbackThreads> threads_;
  const size_t level_;
  std::mutex making_future_;
  c10::intrusive_ptr<Future> future_;
};

void check_tensor(const char* title, const at::Tensor& tensor) {
  TS_CHECK(tensor.device().is_cpu() && tensor.layout() == at::kStrided, title,
           ": got a ", tensor.layout(), " tensor on ", tensor.device(),
           ". Give a dense tensor on the CPU.");
}

void check_all(const char* title, const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) check_tensor(title, tensor);
}

// What is not moved through a copy lies in one piece.
void check_dense(const char* title, const at::Tensor& tensor) {
  check_tensor(title, tensor);
  TS_CHECK(tensor.is_contiguous(), title, ": tensor of ", tensor.sizes(),
           " is not contiguous. Give tensor.contiguous().");
}

const at::Tensor& only(const char* title, const Tensors& tensors) {
  TS_CHECK(tensors.size() == 1, title, ": got ", tensors.size(),
           " tensors. Give one.");
  check_dense(title, tensors.front());
  return tensors.front();
}

void check_pieces(const char* title, const at::Tensor& whole,
                  const at::Tensor& piece, int size) {
  check_dense(title, whole);
  check_dense(title, piece);
  TS_CHECK(whole.scalar_type() == piece.scalar_type(), title, ": ",
           whole.scalar_type(), " and ", piece.scalar_type(),
           " in one call. Give tensors of one dtype.");
  TS_CHECK(whole.numel() == piece.numel() * size, title, ": the tensor of ",
           whole.numel(), " elements is not ", size, " (ranks) times that of ",
           piece.numel(), ".");
}

void check_pieces(const char* title, const Tensors& wholes,
                  const Tensors& pieces, int size) {
  TS_CHECK(wholes.size() == pieces.size(), title, ": ", wholes.size(),
           " tensors for ", pieces.size(), ". Give as many.");
  for (size_t i = 0; i < wholes.size(); ++i) {
    check_pieces(title, wholes[i], pieces[i], size);
  }
}

// No splits are equal ones.
std::vector<int64_t> full_splits(std::vector<int64_t> splits,
                                 const at::Tensor& tensor, int size) {
  c10d::checkSplitSizes(splits, tensor, size);
  if (splits.empty()) splits.assign(size, tensor.size(0) / size);
  return splits;
}

}  // namespace

PythonBackend::PythonBackend(c10::intrusive_ptr<c10d::Backend> backend,
                             std::string where,
                             std::function<void(const std::string&)> fail)
    : Backend(backend->getRank(), backend->getSize()),
      backend_(std::move(backend)),
      threads_(std::make_shared<CallbackThreads>()),
      where_(std::move(where)),
      fail_(std::move(fail)) {}

PythonBackend::~PythonBackend() {
  // The group's threads may need the GIL to drop what they hold.
  PyThreadState* saved =
      Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  fail_ = nullptr;
  backend_.reset();
  if (saved) PyEval_RestoreThread(saved);
}

bool PythonBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  return backend_->supportsTensorAlloc(device);
}

at::Tensor PythonBackend::allocateTensor(long size, at::TensorOptions options) {
  return backend_->allocateTensor(size, options);
}

Pending PythonBackend::collective(const char* title, const Tensors& inputs,
                                  const Start& start) {
  ++sequence_;
  return message(title, inputs, start);
}

Pending PythonBackend::message(const char* title, const Tensors& inputs,
                               const Start& start) {
  auto work = c10::make_intrusive<PythonWork>(
      start(), rank_, title, inputs,
      [title, where = where_] { return c10::str(title, " ", where, ": "); },
      threads_);
  PythonWork::watch(work);
  return work;
}

Pending PythonBackend::allreduce(Tensors& tensors,
                                 const c10d::AllreduceOptions& options) {
  if (tensors.at(0).is_sparse()) return allreduce_sparse(tensors, options);
  only("all_reduce", tensors);
  return collective("tessera:all_reduce", tensors,
                    [&] { return backend_->allreduce(tensors, options); });
}

Pending PythonBackend::allreduce_sparse(Tensors& tensors,
                                        const c10d::AllreduceOptions& options) {
  return collective("tessera:all_reduce", tensors, [&] {
    return backend_->allreduce_sparse(tensors, options);
  });
}

Pending PythonBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  check_all("all_reduce_coalesced", tensors);
  return collective("tessera:all_reduce", tensors, [&] {
    return backend_->allreduce_coalesced(tensors, options);
  });
}

Pending PythonBackend::reduce(Tensors& tensors,
                              const c10d::ReduceOptions& options) {
  check_all("reduce", tensors);
  return collective("tessera:reduce", tensors,
                    [&] { return backend_->reduce(tensors, options); });
}

Pending PythonBackend::broadcast(Tensors& tensors,
                                 const c10d::BroadcastOptions& options) {
  only("broadcast", tensors);
  return collective("tessera:broadcast", tensors,
                    [&] { return backend_->broadcast(tensors, options); });
}

Pending PythonBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& options) {
  check_all("all_gather", inputs);
  for (const Tensors& list : outputs) check_all("all_gather", list);
  return collective("tessera:all_gather", inputs, [&] {
    return backend_->allgather(outputs, inputs, options);
  });
}

Pending PythonBackend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  check_all("all_gather_coalesced", inputs);
  for (const Tensors& list : outputs) check_all("all_gather_coalesced", list);
  return collective("tessera:all_gather", inputs, [&] {
    return backend_->allgather_coalesced(outputs, inputs, options);
  });
}

Pending PythonBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                       const c10d::AllgatherOptions& options) {
  check_pieces("all_gather_into_tensor", output, input, size_);
  return collective("tessera:_all_gather_base", {input}, [&] {
    return backend_->_allgather_base(output, input, options);
  });
}

Pending PythonBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  check_pieces("all_gather_into_tensor", outputs, inputs, size_);
  return collective("tessera:all_gather", inputs, [&] {
    return backend_->allgather_into_tensor_coalesced(outputs, inputs, options);
  });
}

Pending PythonBackend::gather(TensorLists& outputs, Tensors& inputs,
                              const c10d::GatherOptions& options) {
  check_all("gather", inputs);
  for (const Tensors& list : outputs) check_all("gather", list);
  return collective("tessera:gather", inputs,
                    [&] { return backend_->gather(outputs, inputs, options); });
}

Pending PythonBackend::scatter(Tensors& outputs, TensorLists& inputs,
                               const c10d::ScatterOptions& options) {
  check_all("scatter", outputs);
  for (const Tensors& list : inputs) check_all("scatter", list);
  return collective(
      "tessera:scatter", inputs.empty() ? outputs : inputs[0],
      [&] { return backend_->scatter(outputs, inputs, options); });
}

Pending PythonBackend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs,
    const c10d::ReduceScatterOptions& options) {
  check_all("reduce_scatter", outputs);
  for (const Tensors& list : inputs) check_all("reduce_scatter", list);
  return collective("tessera:reduce_scatter", inputs.at(0), [&] {
    return backend_->reduce_scatter(outputs, inputs, options);
  });
}

Pending PythonBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  check_pieces("reduce_scatter_tensor", input, output, size_);
  return collective("tessera:_reduce_scatter_base", {input}, [&] {
    return backend_->_reduce_scatter_base(output, input, options);
  });
}

Pending PythonBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs,
    const c10d::ReduceScatterOptions& options) {
  check_pieces("reduce_scatter_tensor", inputs, outputs, size_);
  return collective("tessera:reduce_scatter", inputs, [&] {
    return backend_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  });
}

Pending PythonBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                const c10d::AllToAllOptions& options) {
  check_all("all_to_all", outputs);
  check_all("all_to_all", inputs);
  return collective("tessera:all_to_all", inputs, [&] {
    return backend_->alltoall(outputs, inputs, options);
  });
}

Pending PythonBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                     std::vector<int64_t>& output_splits,
                                     std::vector<int64_t>& input_splits,
                                     const c10d::AllToAllOptions& options) {
  check_dense("all_to_all_single", output);
  check_dense("all_to_all_single", input);
  auto out = full_splits(output_splits, output, size_);
  auto in = full_splits(input_splits, input, size_);
  return collective("tessera:all_to_all", {input}, [&] {
    return backend_->alltoall_base(output, input, out, in, options);
  });
}

Pending PythonBackend::barrier(const c10d::BarrierOptions& options) {
  return collective("tessera:barrier", {},
                    [&] { return backend_->barrier(options); });
}

Pending PythonBackend::send(Tensors& tensors, int peer, int tag) {
  only("send", tensors);
  return message("tessera:send", tensors,
                 [&] { return backend_->send(tensors, peer, tag); });
}

Pending PythonBackend::recv(Tensors& tensors, int peer, int tag) {
  only("recv", tensors);
  return message("tessera:recv", tensors,
                 [&] { return backend_->recv(tensors, peer, tag); });
}

Pending PythonBackend::recvAnysource(Tensors& tensors, int tag) {
  only("recv from any source", tensors);
  return message("tessera:recvAnySource", tensors,
                 [&] { return backend_->recvAnysource(tensors, tag); });
}

}  // namespace tessera::python
