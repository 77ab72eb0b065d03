#include "tessera/comm/mpi/mpi_backend.h"

#include <span>

#include "tessera/comm/base/c10d_forms.h"
#include "tessera/comm/base/c10d_reduce_op.h"
#include "tessera/comm/base/reduce.h"
#include "tessera/comm/base/split_bytes.h"
#include "tessera/comm/mpi/progress.h"
#include "tessera/comm/mpi/reducible.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"

namespace tessera::comm::mpi {
namespace {

char* begin_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.data_ptr());
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  return begin_of(a) < begin_of(b) + b.nbytes() &&
         begin_of(b) < begin_of(a) + a.nbytes();
}

void check_dense(const at::Tensor& tensor) {
  TS_CHECK(tensor.is_contiguous() && tensor.is_cpu(), "mpi carries contiguous ",
           "CPU tensors, not ", tensor.sizes(), " with strides ",
           tensor.strides(), " on ", tensor.device(), ".");
}

Piece piece_of(const at::Tensor& tensor, int64_t peer) {
  check_dense(tensor);
  return {.data = begin_of(tensor),
          .bytes = static_cast<int64_t>(tensor.nbytes()),
          .peer = peer};
}

// Rows of one tensor for each rank.
std::vector<Piece> pieces_of(const at::Tensor& tensor,
                             std::vector<int64_t> splits, int64_t ranks) {
  check_dense(tensor);
  if (splits.empty()) splits.assign(ranks, tensor.size(0) / ranks);
  std::vector<Piece> pieces;
  char* data = begin_of(tensor);
  for (const int64_t bytes : split_bytes(tensor, std::move(splits))) {
    pieces.push_back({data, bytes, static_cast<int64_t>(pieces.size())});
    data += bytes;
  }
  return pieces;
}

class MpiBackend : public C10dForms {
 public:
  MpiBackend(const Place& place, std::shared_ptr<Channel> channel,
             int64_t largest_tag)
      : C10dForms(static_cast<int>(place.rank),
                  static_cast<int>(place.ranks.size())),
        channel_(std::move(channel)),
        largest_tag_(largest_tag) {}
  ~MpiBackend() override { channel_->close(); }

  const std::string getBackendName() const override { return "mpi"; }

  Pending allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override {
    const at::Tensor tensor = tensors.at(0);
    const ReduceOp op =
        reduce_op_of(options.reduceOp, tensor.scalar_type(), "mpi");
    check_dense(tensor);
    const Reducible r(tensor);
    Job job = job_of(c10d::OpType::ALLREDUCE, tensors, tensor);
    job.post = [r, op, n = tensor.numel()](Comm& comm, Requests& requests) {
      r.read();
      comm.all_reduce(r.data(), n, r.dtype(), op, requests);
    };
    job.finish = [r, op, ranks = size_](const Requests&) {
      r.write(op, ranks);
    };
    return submit(std::move(job));
  }

  Pending _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    const ReduceOp op =
        reduce_op_of(options.reduceOp, input.scalar_type(), "mpi");
    check_dense(input);
    check_dense(output);
    const Reducible from(input);
    const Reducible to(output, /*apart=*/overlap(output, input));
    Job job = job_of(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, input);
    job.post = [from, to, op, n = output.numel()](Comm& comm,
                                                  Requests& requests) {
      from.read();
      comm.reduce_scatter(to.data(), from.data(), n, to.dtype(), op, requests);
    };
    job.finish = [from, to, op, ranks = size_](const Requests&) {
      to.write(op, ranks);
    };
    return submit(std::move(job));
  }

  Pending _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    check_dense(output);
    const Piece in = piece_of(input, 0);
    const bool in_place = in.data == begin_of(output) + rank_ * in.bytes;
    const at::Tensor from =
        !in_place && overlap(output, input) ? input.clone() : input;
    Job job = job_of(c10d::OpType::_ALLGATHER_BASE, {output}, output);
    job.post = [from, output, in_place, bytes = in.bytes](Comm& comm,
                                                          Requests& requests) {
      comm.all_gather(begin_of(output), in_place ? nullptr : begin_of(from),
                      bytes, requests);
    };
    return submit(std::move(job));
  }

  Pending broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override {
    Job job = job_of(c10d::OpType::BROADCAST, tensors, tensors.at(0));
    job.post = [piece = piece_of(tensors[0], options.rootRank)](
                   Comm& comm, Requests& requests) {
      comm.broadcast(piece.data, piece.bytes, piece.peer, requests);
    };
    return submit(std::move(job));
  }

  Pending alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions&) override {
    std::vector<Piece> sends = pieces_of(input, input_splits, size_);
    std::vector<Piece> receives = pieces_of(output, output_splits, size_);
    Job job = job_of(c10d::OpType::ALLTOALL_BASE, {output, input}, input);
    // MPI_Ialltoallv has ints for places too: bytes go from rank to rank.
    job.post = [sends = std::move(sends), receives = std::move(receives)](
                   Comm& comm, Requests& requests) {
      comm.exchange(sends, receives, requests);
    };
    return submit(std::move(job));
  }

  Pending barrier(const c10d::BarrierOptions&) override {
    Job job = job_of(c10d::OpType::BARRIER, {}, {});
    job.post = [](Comm& comm, Requests& requests) { comm.barrier(requests); };
    return submit(std::move(job));
  }

  Pending send(Tensors& tensors, int peer, int tag) override {
    check_tag(tag);
    Job job = job_of(c10d::OpType::SEND, tensors, tensors.at(0));
    job.is_message = true;
    job.post = [piece = piece_of(tensors[0], peer), tag](Comm& comm,
                                                         Requests& requests) {
      comm.send(piece, tag, requests);
    };
    return submit(std::move(job));
  }

  Pending recv(Tensors& tensors, int peer, int tag) override {
    return receive(c10d::OpType::RECV, tensors, peer, tag);
  }

  Pending recvAnysource(Tensors& tensors, int tag) override {
    return receive(c10d::OpType::RECVANYSOURCE, tensors, kAnySource, tag);
  }

 private:
  void check_tag(int64_t tag) const {
    TS_CHECK(tag <= largest_tag_, "tag ", tag, " is beyond ", largest_tag_,
             ", the largest that ", library_name(), " has.");
  }

  Job job_of(c10d::OpType type, Tensors tensors,
             const at::Tensor& moved) const {
    return {.work = c10::make_intrusive<PendingWork>(rank_, type,
                                                     std::move(tensors)),
            .bytes = moved.defined() ? static_cast<int64_t>(moved.nbytes()) : 0,
            .post = {},
            .finish = {}};
  }

  Pending submit(Job job) {
    Pending work = job.work;
    channel_->submit(std::move(job));
    return work;
  }

  Pending receive(c10d::OpType type, Tensors& tensors, int64_t peer, int tag) {
    check_tag(tag);
    const auto work = c10::make_intrusive<PendingWork>(rank_, type, tensors);
    const Piece piece = piece_of(tensors.at(0), peer);
    return submit({.work = work,
                   .is_message = true,
                   .bytes = piece.bytes,
                   .post =
                       [piece, tag](Comm& comm, Requests& requests) {
                         comm.recv(piece, tag, requests);
                       },
                   .finish =
                       [work](const Requests& requests) {
                         work->set_source(static_cast<int>(requests.source()));
                       }});
  }

  std::shared_ptr<Channel> channel_;
  const int64_t largest_tag_;
};

// Ranks of MPI_COMM_WORLD are ours.
void check_world(const Place& place, const World& world) {
  TS_CHECK_CONFIG(
      world.rank == place.ranks[place.rank] && world.size == place.world_size,
      "comm.backend=mpi: MPI says that this is rank ", world.rank, " of ",
      world.size, ", but it was started as rank ", place.ranks[place.rank],
      " of ", place.world_size, ". Start the ranks with mpirun -np ",
      place.world_size, " (of ", library_name(),
      ", which this was built with), without --nproc.");
}

}  // namespace

bool is_built() { return true; }

std::string note() { return c10::str(library_name(), ", under its mpirun"); }

Connection connect(Rendezvous rendezvous, const Place& place) {
  const World world = Progress::of_process().world();
  check_world(place, world);
  // Making a communicator waits for peers without a look at their fate: come
  // together first.
  rendezvous.meet(place.rank, static_cast<int64_t>(place.ranks.size()),
                  place.timeout);
  const uint64_t name =
      hash64(std::as_bytes(std::span(place.ranks.data(), place.ranks.size())),
             hash64(place.group));
  const auto channel =
      Channel::open(place.ranks, name, place.timeout, place.largest_count);
  return {.backend = c10::make_intrusive<MpiBackend>(place, channel,
                                                     world.largest_tag),
          .fail = [channel](const std::string& why) { channel->fail(why); },
          .close = [channel] { channel->wait(); }};
}

}  // namespace tessera::comm::mpi
