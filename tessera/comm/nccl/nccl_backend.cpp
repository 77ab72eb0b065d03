#include "tessera/comm/nccl/nccl_backend.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/env.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "tessera/comm/base/split_bytes.h"
#include "tessera/core/error.h"

namespace tessera::comm::nccl {
namespace {

using c10d::OpType;
using c10d::ProcessGroupNCCL;
using Library = c10::intrusive_ptr<ProcessGroupNCCL>;
using Pending = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// LibTorch reads these where a group is made.
void settle_environment() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Its watchdog would end the process before the ranks have a verdict: with
    // this it starts none. It makes wait() block too, which is not called.
    c10::utils::set_env("TORCH_NCCL_BLOCKING_WAIT", "1");
    // Records that only the watchdog takes out again.
    c10::utils::set_env("TORCH_FR_BUFFER_SIZE", "0");
    c10::utils::set_env("TORCH_NCCL_TRACE_BUFFER_SIZE", "0");
    // Messages have communicators of their own here.
    c10::utils::set_env("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
                        "0");
  });
}

class NcclOperation final : public OnDevice {
 public:
  // A copy holds no outputs: the tensors are free once the stream is ordered.
  explicit NcclOperation(const Pending& work)
      : work_(dynamic_cast<const ProcessGroupNCCL::WorkNCCL&>(*work)) {}

  bool has_begun() override {
    return checked([this] { return work_.isStarted(); });
  }
  bool has_ended() override {
    return checked([this] { return work_.isCompleted(); });
  }
  void order_stream() override { work_.synchronize(); }
  double seconds() override { return 1e-3 * work_.getDuration(); }

 private:
  bool checked(const std::function<bool()>& ask) {
    // Another thread may be recording a graph.
    const c10::cuda::CUDAStreamCaptureModeGuard guard(
        cudaStreamCaptureModeThreadLocal);
    const bool is_so = ask();
    if (const auto error = work_.exception()) std::rethrow_exception(error);
    return is_so;
  }

  ProcessGroupNCCL::WorkNCCL work_;
};

// A communicator of some ranks.
class NcclChannel final : public Channel {
 public:
  NcclChannel(Rendezvous rendezvous, Place place, at::Device device)
      : rendezvous_(std::move(rendezvous)),
        place_(std::move(place)),
        device_(device) {}

  void open() override {
    const auto size = static_cast<int64_t>(place_.ranks.size());
    // NCCL waits for ever for a rank that does not come.
    rendezvous_.meet(place_.rank, size, place_.timeout);
    auto options = ProcessGroupNCCL::Options::create();
    options->timeout = place_.timeout;
    options->global_ranks_in_group.assign(place_.ranks.begin(),
                                          place_.ranks.end());
    library_ = c10::make_intrusive<ProcessGroupNCCL>(
        rendezvous_.group_store(), static_cast<int>(place_.rank),
        static_cast<int>(size), std::move(options));
    library_->enableCollectivesTiming();
    library_->eagerConnectSingleDevice(device_);
  }
  void close() override { library_->shutdown(); }
  void abort() override { library_->abort(); }

  // REQUIRES: open() returned.
  ProcessGroupNCCL& library() { return *library_; }

 private:
  Rendezvous rendezvous_;
  const Place place_;
  const at::Device device_;
  Library library_;
};

class NcclBackend : public c10d::Backend {
 public:
  NcclBackend(Rendezvous rendezvous, Place place, std::shared_ptr<Watch> watch)
      : Backend(static_cast<int>(place.rank),
                static_cast<int>(place.ranks.size())),
        rendezvous_(std::move(rendezvous)),
        place_(std::move(place)),
        device_(at::kCUDA, at::cuda::current_device()),
        watch_(std::move(watch)) {}

  ~NcclBackend() override {
    for (const auto& [key, one] : lanes_) one.lane->close(place_.timeout);
  }

  const std::string getBackendName() const override { return "nccl"; }

  Pending allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override {
    check_summed(tensors.at(0));
    return collective(
        OpType::ALLREDUCE, tensors[0].numel(),
        [tensors, op = options.reduceOp](ProcessGroupNCCL& library) mutable {
          c10d::AllreduceOptions own;
          own.reduceOp = op;
          return library.allreduce(tensors, own);
        });
  }

  Pending broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override {
    return collective(OpType::BROADCAST, tensors.at(0).numel(),
                      [bytes = Tensors{bytes_of(tensors[0])},
                       root = options.rootRank](auto& library) mutable {
                        c10d::BroadcastOptions own;
                        own.rootRank = root;
                        return library.broadcast(bytes, own);
                      });
  }

  Pending _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    return collective(
        OpType::_ALLGATHER_BASE, input.numel(),
        [out = bytes_of(output), in = bytes_of(input)](auto& library) mutable {
          return library._allgather_base(out, in, {});
        });
  }

  Pending _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    check_summed(input);
    return collective(OpType::_REDUCE_SCATTER_BASE, output.numel(),
                      [out = output, in = input, op = options.reduceOp](
                          ProcessGroupNCCL& library) mutable {
                        c10d::ReduceScatterOptions own;
                        own.reduceOp = op;
                        return library._reduce_scatter_base(out, in, own);
                      });
  }

  // Where this rank has nothing to give or get, others may have.
  Pending alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions&) override {
    return collective(
        OpType::ALLTOALL_BASE, /*elements=*/1,
        [out = bytes_of(output), in = bytes_of(input),
         out_bytes = split_bytes(output, output_splits),
         in_bytes = split_bytes(input, input_splits)](auto& library) mutable {
          return library.alltoall_base(out, in, out_bytes, in_bytes, {});
        });
  }

  Pending send(Tensors& tensors, int peer, int /*tag*/) override {
    return submit(
        pair(rank_, peer), OpType::SEND, tensors.at(0).numel(),
        [bytes = Tensors{bytes_of(tensors[0])}, to = place_in_pair(peer)](
            auto& library) mutable { return library.send(bytes, to, 0); });
  }

  Pending recv(Tensors& tensors, int peer, int /*tag*/) override {
    return submit(
        pair(peer, rank_), OpType::RECV, tensors.at(0).numel(),
        [bytes = Tensors{bytes_of(tensors[0])}, from = place_in_pair(peer)](
            auto& library) mutable { return library.recv(bytes, from, 0); });
  }

 private:
  struct OneLane {
    std::shared_ptr<NcclChannel> channel;
    std::shared_ptr<Lane> lane;
  };

  static void check_summed(const at::Tensor& tensor) {
    TS_CHECK(tensor.scalar_type() != at::kShort,
             "NCCL does not reduce int16. Convert it to int32.");
  }

  int place_in_pair(int peer) const { return peer < rank_ ? 0 : 1; }

  // Messages in one direction.
  const OneLane& pair(int from, int to) {
    const auto [low, high] = std::minmax(from, to);
    return lane_of(c10::str(from, "-to-", to, "/"),
                   {.rank = rank_ == low ? 0 : 1,
                    .ranks = {place_.ranks[low], place_.ranks[high]},
                    .timeout = place_.timeout});
  }

  const OneLane& lane_of(const std::string& key, Place place) {
    OneLane& one = lanes_[key];
    if (!one.lane) {
      one.channel = std::make_shared<NcclChannel>(
          Rendezvous(rendezvous_.group_store(), key), std::move(place),
          device_);
      one.lane = watch_->make_lane(device_, one.channel);
    }
    return one;
  }

  template <typename Call>
  Pending collective(OpType type, int64_t elements, Call call) {
    return submit(lane_of("all/", place_), type, elements, std::move(call));
  }

  template <typename Call>
  Pending submit(const OneLane& one, OpType type, int64_t elements, Call call) {
    auto work = c10::make_intrusive<LaneWork>(rank_, type);
    if (elements == 0) {
      work->complete(nullptr);
    } else {
      one.lane->submit(work, [channel = one.channel, call]() mutable {
        return std::make_shared<NcclOperation>(call(channel->library()));
      });
    }
    return work;
  }

  Rendezvous rendezvous_;
  const Place place_;
  const at::Device device_;
  std::shared_ptr<Watch> watch_;
  std::map<std::string, OneLane> lanes_;
};

}  // namespace

bool is_built() { return true; }

std::string note() { return "LibTorch's NCCL, between GPUs"; }

std::string gpu_of_this_thread() {
  const auto& uuid = at::cuda::getCurrentDeviceProperties()->uuid.bytes;
  std::string name = "GPU";
  for (size_t i = 0; i < sizeof(uuid); ++i) {
    constexpr const char* kDigits = "0123456789abcdef";
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) name += '-';
    name += kDigits[(uuid[i] >> 4) & 0xf];
    name += kDigits[uuid[i] & 0xf];
  }
  return name;
}

Connection connect(const Rendezvous& rendezvous, const Place& place,
                   const std::shared_ptr<Watch>& watch) {
  settle_environment();
  return {.backend = c10::make_intrusive<NcclBackend>(rendezvous, place, watch),
          .fail = [watch](const std::string& why) { watch->fail(why); }};
}

}  // namespace tessera::comm::nccl
