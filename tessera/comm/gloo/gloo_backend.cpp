#include "tessera/comm/gloo/gloo_backend.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "tessera/comm/base/keep_for_ever.h"
#include "tessera/comm/base/split_bytes.h"
#include "tessera/comm/base/worker.h"
#include "tessera/comm/gloo/message_queue.h"
#include "tessera/comm/gloo/open_collectives.h"
#include "tessera/core/broken_pipe.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"

namespace tessera::comm::gloo {
namespace {

using Tensors = std::vector<at::Tensor>;
using Pending = c10::intrusive_ptr<c10d::Work>;
using c10d::ProcessGroupGloo;

// Gloo's thread throws, where nobody can catch it, at a message of another size
// than is awaited: ranks call different collectives.
void explain_what_gloo_throws() {
  static const std::terminate_handler before = std::set_terminate([] {
    std::string what;
    try {
      if (const auto error = std::current_exception()) {
        std::rethrow_exception(error);
      }
    } catch (const std::exception& error) {
      what = error.what();
    } catch (...) {
      what.clear();
    }
    if (what.find("gloo/") == std::string::npos) return before();
    log::error(
        "gloo got another message than it awaits: ranks called different "
        "collectives, or with different sizes. TORCH_DISTRIBUTED_DEBUG=DETAIL "
        "names them. (",
        what, ")");
    std::_Exit(static_cast<int>(ExitCode::kFailed));
  });
}

class GlooBackend : public c10d::Backend {
 public:
  explicit GlooBackend(c10::intrusive_ptr<ProcessGroupGloo> group)
      : Backend(group->getRank(), group->getSize()), group_(std::move(group)) {}

  // Sends that nobody awaited are delivered, unless their peer is gone.
  ~GlooBackend() override {
    close();
    // Its thread would be waited for until the time is out.
    if (collectives_->is_held_up()) keep_for_ever(group_.release());
  }

  const std::string getBackendName() const override { return "gloo"; }

  Pending allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override {
    check_summed(tensors.at(0));
    const at::Tensor tensor = tensors.at(0);
    if (tensor.numel() == 0) return barrier({});
    c10d::AllreduceOptions sum = options;
    std::function<void()> divide;
    if (options.reduceOp.op_ == c10d::ReduceOp::AVG) {
      sum.reduceOp = c10d::ReduceOp::SUM;
      divide = [tensor, n = size_] { tensor.div_(n); };
    }
    return tracked(group_->allreduce(tensors, sum), c10d::OpType::ALLREDUCE,
                   tensors, std::move(divide));
  }

  Pending broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override {
    if (tensors.at(0).numel() == 0) return barrier({});
    Tensors bytes{bytes_of(tensors[0])};
    return tracked(group_->broadcast(bytes, options), c10d::OpType::BROADCAST,
                   tensors);
  }

  Pending _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    if (input.numel() == 0) return barrier({});
    at::Tensor out = bytes_of(output);
    at::Tensor in = bytes_of(input);
    return tracked(group_->_allgather_base(out, in, options),
                   c10d::OpType::_ALLGATHER_BASE, {output});
  }

  // LibTorch's own reduces everything too, and is done only in wait().
  Pending _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    check_summed(input);
    if (output.numel() == 0) return barrier({});
    Tensors whole{input.detach().clone()};
    c10d::AllreduceOptions sum;
    const bool mean = options.reduceOp.op_ == c10d::ReduceOp::AVG;
    if (!mean) sum.reduceOp = options.reduceOp;
    return tracked(
        group_->allreduce(whole, sum), c10d::OpType::_REDUCE_SCATTER_BASE,
        {output}, [output, mean, whole = whole[0], rank = rank_, n = size_] {
          const int64_t count = output.numel();
          output.view(-1).copy_(whole.view(-1).narrow(0, rank * count, count));
          if (mean) output.div_(n);
        });
  }

  Pending alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    at::Tensor out = bytes_of(output);
    at::Tensor in = bytes_of(input);
    std::vector<int64_t> out_bytes = split_bytes(output, output_splits);
    std::vector<int64_t> in_bytes = split_bytes(input, input_splits);
    return tracked(group_->alltoall_base(out, in, out_bytes, in_bytes, options),
                   c10d::OpType::ALLTOALL_BASE, {output});
  }

  Pending barrier(const c10d::BarrierOptions& options) override {
    return tracked(group_->barrier(options), c10d::OpType::BARRIER, {});
  }

  Pending send(Tensors& tensors, int peer, int tag) override {
    check_tag(tag);
    const Pending line = line_to(peer);
    return queued(group_->send(tensors, peer, tag), line, c10d::OpType::SEND,
                  tensors);
  }

  Pending recv(Tensors& tensors, int peer, int tag) override {
    check_tag(tag);
    const Pending line = line_to(peer);
    return queued(group_->recv(tensors, peer, tag), line, c10d::OpType::RECV,
                  tensors);
  }

  void close() {
    messages_->close();
    collectives_->wait();
  }

  // Gloo has no word for it, but closes all connections of a group when one of
  // its messages comes too late: wait a moment for one that never comes. A peer
  // whose connection is closed already fails at once, and closes no other.
  void fail(const std::string& why) {
    collectives_->fail(why);
    Tensors nothing{at::empty({1}, at::kByte)};
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      try {
        group_->recv(nothing, peer, kNeverSent)
            ->wait(std::chrono::milliseconds(1));
      } catch (const std::exception& error) {
        log::debug("gloo's connection to ", peer,
                   " is closed: ", message_of(error));
      }
    }
  }

 private:
  static constexpr int kNeverSent = INT32_MAX;  // a tag

  static void check_summed(const at::Tensor& tensor) {
    TS_CHECK(tensor.scalar_type() != at::kShort,
             "Gloo does not reduce int16. Convert it to int32.");
  }

  static void check_tag(int tag) {
    TS_CHECK(tag < kNeverSent, "tag ", tag,
             " is not below the largest, which Gloo's lines are watched by. "
             "Use a smaller one.");
  }

  Pending tracked(const Pending& collective, c10d::OpType type, Tensors tensors,
                  std::function<void()> then = {}) {
    return collectives_->track(collective, rank_, type, std::move(tensors),
                               std::move(then));
  }

  // A receive that never ends, and fails when the line closes.
  Pending line_to(int peer) {
    const std::lock_guard lock(lines_mutex_);
    Pending& line = lines_[peer];
    if (!line) {
      Tensors nothing{at::empty({1}, at::kByte)};
      line = group_->recv(nothing, peer, kNeverSent);
    }
    return line;
  }

  Pending queued(Pending message, const Pending& line, c10d::OpType type,
                 const Tensors& tensors) {
    auto work =
        c10::make_intrusive<PendingWork>(rank_, type, tensors, messages_);
    messages_->submit(std::move(message), work, line);
    return work;
  }

  c10::intrusive_ptr<ProcessGroupGloo> group_;
  std::mutex lines_mutex_;
  std::map<int, Pending> lines_;  // by peer
  const std::shared_ptr<OpenCollectives> collectives_ =
      std::make_shared<OpenCollectives>();
  std::shared_ptr<MessageQueue> messages_ = std::make_shared<MessageQueue>();
};

}  // namespace

Connection make_gloo_backend(Rendezvous rendezvous,
                             const GlooOptions& options) {
  // Connecting waits for peers without a look at their fate: meet first.
  rendezvous.meet(options.rank, options.size, options.timeout);
  explain_what_gloo_throws();
  ignore_broken_pipes();  // a write to a peer that has gone must fail
  auto gloo_options = ProcessGroupGloo::Options::create(options.timeout);
  gloo_options->threads = 1;  // operations run in the order of the calls
  try {
    gloo_options->devices.push_back(
        ProcessGroupGloo::createDeviceForHostname(options.address));
    auto group = c10::make_intrusive<ProcessGroupGloo>(
        rendezvous.group_store(), options.rank, options.size, gloo_options);
    // A rank that is done at once must not close before all are connected.
    group->barrier()->wait();
    auto backend = c10::make_intrusive<GlooBackend>(std::move(group));
    return {.backend = backend,
            .fail = [backend](const std::string& why) { backend->fail(why); },
            .close = [backend] { backend->close(); }};
  } catch (const std::exception& error) {
    TS_CHECK_REACH(false, "gloo on ", options.address,
                   " did not connect to its ", options.size - 1,
                   " peers: ", message_of(error));
  }
}

}  // namespace tessera::comm::gloo
