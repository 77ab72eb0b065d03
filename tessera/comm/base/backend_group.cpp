#include "tessera/comm/base/backend_group.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "tessera/comm/base/backend_work.h"
#include "tessera/comm/base/blocked_time.h"
#include "tessera/comm/base/c10d_reduce_op.h"
#include "tessera/comm/base/reduce.h"
#include "tessera/core/error.h"

namespace tessera::comm {

namespace {

Operation operation_of(Verb verb, const at::Tensor& tensor) {
  return {.verb = verb,
          .dtype = tensor.scalar_type(),
          .shape = at::DimVector(tensor.sizes()),
          .device = tensor.device(),
          .bytes = static_cast<int64_t>(tensor.nbytes())};
}

// Of arguments: ours, or c10d's own checks. All else, as what Gloo throws where
// a peer has gone, is a failure.
bool is_refusal(const std::exception& error) {
  if (const auto* ours = dynamic_cast<const Error*>(&error)) {
    return ours->exit_code() != ExitCode::kUnreachable;
  }
  return dynamic_cast<const c10::Error*>(&error) != nullptr &&
         dynamic_cast<const c10::DistError*>(&error) == nullptr;
}

}  // namespace

BackendGroup::BackendGroup(GroupInfo info, Connection connection, Judge judge)
    : state_(std::make_shared<GroupState>(std::move(info))),
      connection_(std::move(connection)) {
  state_->names_peers = connection_.names_peers;
  state_->judge = std::move(judge);
}

BackendGroup::~BackendGroup() = default;

const std::string& BackendGroup::name() const { return state_->info.name; }
const std::string& BackendGroup::backend() const {
  return state_->info.backend;
}
const std::vector<int64_t>& BackendGroup::ranks() const {
  return state_->info.ranks;
}
int64_t BackendGroup::rank() const { return state_->info.rank; }

Work BackendGroup::all_reduce(at::Tensor tensor, ReduceOp op, Mode mode) {
  check_tensor(Verb::kAllReduce, "tensor", tensor);
  check_reducible(tensor.scalar_type(), op);
  Operation operation = operation_of(Verb::kAllReduce, tensor);
  operation.op = op;
  return start(operation, mode, [&] {
    std::vector<at::Tensor> tensors{tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d_op_of(op);
    options.asyncOp = mode == Mode::kAsync;
    return connection_.backend->allreduce(tensors, options);
  });
}

Work BackendGroup::all_gather(at::Tensor output, at::Tensor input, Mode mode) {
  check_pieces(Verb::kAllGather, output, input);
  return start(operation_of(Verb::kAllGather, output), mode, [&] {
    c10d::AllgatherOptions options;
    options.asyncOp = mode == Mode::kAsync;
    return connection_.backend->_allgather_base(output, input, options);
  });
}

Work BackendGroup::reduce_scatter(at::Tensor output, at::Tensor input,
                                  ReduceOp op, Mode mode) {
  check_pieces(Verb::kReduceScatter, input, output);
  check_reducible(input.scalar_type(), op);
  Operation operation = operation_of(Verb::kReduceScatter, input);
  operation.op = op;
  return start(operation, mode, [&] {
    c10d::ReduceScatterOptions options;
    options.reduceOp = c10d_op_of(op);
    options.asyncOp = mode == Mode::kAsync;
    return connection_.backend->_reduce_scatter_base(output, input, options);
  });
}

Work BackendGroup::all_to_all(at::Tensor output, at::Tensor input,
                              std::vector<int64_t> output_splits,
                              std::vector<int64_t> input_splits, Mode mode) {
  check_tensor(Verb::kAllToAll, "output", output);
  check_tensor(Verb::kAllToAll, "input", input);
  TS_CHECK(output.scalar_type() == input.scalar_type(), where(Verb::kAllToAll),
           "output is ", output.scalar_type(), ", input ", input.scalar_type(),
           ".");
  output_splits = checked_splits("output", output, std::move(output_splits));
  input_splits = checked_splits("input", input, std::move(input_splits));
  const at::Tensor& larger = output.numel() > input.numel() ? output : input;
  return start(operation_of(Verb::kAllToAll, larger), mode, [&] {
    c10d::AllToAllOptions options;
    options.asyncOp = mode == Mode::kAsync;
    return connection_.backend->alltoall_base(output, input, output_splits,
                                              input_splits, options);
  });
}

Work BackendGroup::broadcast(at::Tensor tensor, int64_t root, Mode mode) {
  check_tensor(Verb::kBroadcast, "tensor", tensor);
  TS_CHECK(root >= 0 && root < size(), where(Verb::kBroadcast), "root ", root,
           " is not a rank of the group (0 .. ", size() - 1, ").");
  Operation operation = operation_of(Verb::kBroadcast, tensor);
  operation.peer = ranks()[root];
  return start(operation, mode, [&] {
    std::vector<at::Tensor> tensors{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.asyncOp = mode == Mode::kAsync;
    return connection_.backend->broadcast(tensors, options);
  });
}

Work BackendGroup::send(at::Tensor tensor, int64_t peer, int64_t tag) {
  check_tensor(Verb::kSend, "tensor", tensor);
  check_peer(Verb::kSend, peer, tag);
  Operation operation = operation_of(Verb::kSend, tensor);
  operation.peer = ranks()[peer];
  operation.tag = tag;
  return start(operation, Mode::kAsync, [&] {
    std::vector<at::Tensor> tensors{tensor};
    return connection_.backend->send(tensors, static_cast<int>(peer),
                                     static_cast<int>(tag));
  });
}

Work BackendGroup::recv(at::Tensor tensor, int64_t peer, int64_t tag) {
  check_tensor(Verb::kRecv, "tensor", tensor);
  check_peer(Verb::kRecv, peer, tag);
  Operation operation = operation_of(Verb::kRecv, tensor);
  operation.peer = ranks()[peer];
  operation.tag = tag;
  return start(operation, Mode::kAsync, [&] {
    std::vector<at::Tensor> tensors{tensor};
    return connection_.backend->recv(tensors, static_cast<int>(peer),
                                     static_cast<int>(tag));
  });
}

void BackendGroup::barrier() {
  start({.verb = Verb::kBarrier}, Mode::kBlocking, [&] {
    c10d::BarrierOptions options;
    options.asyncOp = false;
    return connection_.backend->barrier(options);
  });
}

void BackendGroup::compare_calls() {
  if (!connection_.compare_next) return;
  connection_.compare_next();
  barrier();
  barrier();
}

at::Tensor BackendGroup::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  return connection_.empty(sizes, dtype);
}

at::Tensor zeros(Group& group, at::IntArrayRef sizes,
                 const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return at::zeros(sizes, options);
  return group.empty(sizes, c10::typeMetaToScalarType(options.dtype())).zero_();
}

std::vector<VerbStats> BackendGroup::stats() const {
  return state_->recorder.stats();
}

void BackendGroup::reset_stats() { state_->recorder.reset_stats(); }

std::string BackendGroup::flight_record() const {
  return state_->recorder.text();
}

void BackendGroup::fail(const std::string& why) { connection_.fail(why); }

void BackendGroup::close() { connection_.close(); }

std::function<GroupReport()> BackendGroup::reporter() const {
  return [state = state_] { return state->report(); };
}

Work BackendGroup::start(Operation operation, Mode mode,
                         const std::function<Pending()>& call) {
  // Who waits for a device may have to wait once more, in synchronize().
  const bool done_here = mode == Mode::kBlocking && operation.device.is_cpu();
  const BlockedTime blocked(done_here);
  check_usable();
  const uint64_t ticket = state_->recorder.begin(operation);
  const auto explained = [&](const auto& part) {
    try {
      part();
    } catch (const std::exception&) {
      rethrow_explained(*state_, operation, ticket);
    }
  };
  const bool is_collective = !is_point_to_point(operation.verb);
  if (is_collective && connection_.before) {
    explained([&] { connection_.before(operation); });
  }
  Pending work = called(call, operation, ticket);
  if (is_collective && connection_.taken) {
    explained([&] { connection_.taken(operation); });
  }
  if (done_here) {
    explained([&] { work->wait(); });
    state_->recorder.end(ticket, false);
    return {};
  }
  auto impl = std::make_shared<BackendWork>();
  impl->state = state_;
  impl->ticket = ticket;
  impl->operation = std::move(operation);
  impl->work = std::move(work);
  impl->watch_completion();
  if (mode == Mode::kBlocking) impl->wait();
  return Work(std::move(impl));
}

// What the backend refuses at the call has not begun: the group goes on.
BackendGroup::Pending BackendGroup::called(const std::function<Pending()>& call,
                                           const Operation& operation,
                                           uint64_t ticket) {
  try {
    return call();
  } catch (const std::exception& error) {
    if (!is_refusal(error)) rethrow_explained(*state_, operation, ticket);
    state_->recorder.take_back(ticket);
    const Failure failure = failure_of(std::current_exception());
    detail::throw_error(failure.code,
                        explain(state_->info, operation, failure.text),
                        {__func__, __FILE__, __LINE__});
  }
}

void BackendGroup::check_usable() const {
  const std::string failure = state_->failure_so_far();
  TS_CHECK_REACH(failure.empty(), "group '", name(),
                 "' cannot go on after an earlier failure: ", failure);
}

std::string BackendGroup::where(Verb verb) const {
  return c10::str(name_of(verb), " on group '", name(), "' (", size(),
                  " ranks): ");
}

void BackendGroup::check_tensor(Verb verb, const char* what,
                                const at::Tensor& tensor) const {
  TS_CHECK(tensor.defined(), where(verb), what, " is undefined.");
  TS_CHECK(tensor.layout() == at::kStrided && tensor.is_contiguous(),
           where(verb), what, " ", tensor.sizes(), " with strides ",
           tensor.strides(), " is not contiguous. Pass .contiguous().");
  TS_CHECK(carries(tensor), where(verb), what, " lies on ", tensor.device(),
           "; ", backend(), " carries CPU tensors.");
}

bool BackendGroup::carries(const at::Tensor& tensor) const {
  return !tensor.defined() || tensor.is_cpu() || connection_.any_device ||
         tensor.device().type() == connection_.device;
}

void BackendGroup::check_pieces(Verb verb, const at::Tensor& whole,
                                const at::Tensor& piece) const {
  const bool gathers = verb == Verb::kAllGather;
  check_tensor(verb, gathers ? "output" : "input", whole);
  check_tensor(verb, gathers ? "input" : "output", piece);
  TS_CHECK(whole.scalar_type() == piece.scalar_type(), where(verb),
           "output and input are ", whole.scalar_type(), " and ",
           piece.scalar_type(), "; they must be of one dtype.");
  TS_CHECK(whole.numel() == size() * piece.numel(), where(verb),
           gathers ? "output" : "input", " holds ", whole.numel(),
           " elements, expected ", size(), " x ", piece.numel(), " = ",
           size() * piece.numel(), ".");
}

void BackendGroup::check_peer(Verb verb, int64_t peer, int64_t tag) const {
  TS_CHECK(peer >= 0 && peer < size(), where(verb), "peer ", peer,
           " is not a rank of the group (0 .. ", size() - 1, ").");
  TS_CHECK(peer != rank(), where(verb), "peer ", peer, " is this rank itself.");
  TS_CHECK(tag >= 0 && tag <= INT32_MAX, where(verb), "tag ", tag,
           " is not in 0 .. ", INT32_MAX, ".");
}

std::vector<int64_t> BackendGroup::checked_splits(
    const char* what, const at::Tensor& tensor,
    std::vector<int64_t> splits) const {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
  if (splits.empty()) {
    TS_CHECK(rows % size() == 0, where(Verb::kAllToAll), what, " has ", rows,
             " rows, which do not divide by the ", size(),
             " ranks. Pass splits.");
    return std::vector<int64_t>(ranks().size(), rows / size());
  }
  const bool fits =
      static_cast<int64_t>(splits.size()) == size() &&
      std::all_of(splits.begin(), splits.end(),
                  [](int64_t s) { return s >= 0; }) &&
      std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows;
  TS_CHECK(fits, where(Verb::kAllToAll), what, " splits ",
           c10::IntArrayRef(splits), " do not share out ", rows, " rows to ",
           size(), " ranks.");
  return splits;
}

}  // namespace tessera::comm
