// A group of ranks and the collectives on it: the one way in which ranks talk.
//
// Verbs:   all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send,
//          recv, barrier. Each says sum or mean where it reduces.
// Tensors: contiguous, dense, of one dtype. Sizes may be 0.
// Async:   every verb returns a Work at once; the tensors must live and stay
//          untouched until wait() returns. Collectives of one group run in the
//          order of the calls; sends and receives go on beside them. Dropping a
//          Work without wait() is allowed; its failure then surfaces at the
//          next call on the group. Mode::kBlocking waits inside of the call; on
//          shm no other thread has to be woken for it.
// Devices: control is the CPU's, data lies on the device of its tensors. Who
//          computes on with a result calls wait(), which orders the device's
//          stream; who reads it on the host synchronize(), which waits for the
//          device. Tensors of the CPU are there when wait() returns.
// Order:   shm's own algorithms sum in rank order: the same bits on every rank,
//          for every size, bucket and time.
// Counted: calls, bytes and seconds of each verb (stats()), and a ring buffer
//          of the last operations (flight recorder).
// Errors:  a time-out, a dead peer, and ranks that disagree about verb, size,
//          dtype or reduction (on shm at once, else at every 128th collective)
//          throw tessera::Error, which names rank, group, operation, sequence
//          number (of the collectives, the same on every rank; of messages,
//          this rank's), shape, elapsed and time-out, and the peers that are
//          missing where the backend knows them. The group cannot be used after
//          that.
// Threads: one thread at a time may call a group.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera::comm {

enum class ReduceOp { kSum, kMean, kMin, kMax, kProduct };

enum class Mode { kAsync, kBlocking };

class Work {
 public:
  // What a backend makes of an operation under way.
  struct Impl {
    virtual ~Impl() = default;
    virtual void wait() = 0;
    virtual void synchronize() { wait(); }
    virtual bool done() const = 0;
  };
  Work() = default;  // nothing to wait for
  explicit Work(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  // What is put on the current stream of the tensors' device from here on sees
  // the result; on the CPU, whose stream is the calling thread, it blocks until
  // the operation is done. Throws what it failed with. Idempotent.
  void wait();
  // The host may read the result: wait(), and then until the device is there.
  void synchronize();
  bool done() const;

 private:
  std::shared_ptr<Impl> impl_;
};

// For how long this thread stood still so far, in waits and in blocking calls
// on any group.
double seconds_blocked();

// What went through a group so far, of one verb.
struct VerbStats {
  std::string verb;
  int64_t calls = 0;
  int64_t bytes = 0;     // of this rank's tensors: the larger of in and out
  double seconds = 0.0;  // from the call until the operation was done
};

class Group {
 public:
  virtual ~Group() = default;

  virtual const std::string& name() const = 0;     // "world", "dp", ...
  virtual const std::string& backend() const = 0;  // "shm", "shm+gloo" ...
  virtual const std::vector<int64_t>& ranks() const = 0;  // global, ascending
  virtual int64_t rank() const = 0;                       // within the group
  int64_t size() const { return static_cast<int64_t>(ranks().size()); }

  // In place over all ranks.
  virtual Work all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::kSum,
                          Mode mode = Mode::kAsync) = 0;
  // output: (size * n), input: (n), in rank order. output may contain input at
  // its own place.
  virtual Work all_gather(at::Tensor output, at::Tensor input,
                          Mode mode = Mode::kAsync) = 0;
  // output: (n), input: (size * n): output is the reduction of piece rank().
  virtual Work reduce_scatter(at::Tensor output, at::Tensor input,
                              ReduceOp op = ReduceOp::kSum,
                              Mode mode = Mode::kAsync) = 0;
  // Rows of dim 0. Empty splits: equal parts.
  virtual Work all_to_all(at::Tensor output, at::Tensor input,
                          std::vector<int64_t> output_splits = {},
                          std::vector<int64_t> input_splits = {},
                          Mode mode = Mode::kAsync) = 0;
  // `root` is a rank of the group.
  virtual Work broadcast(at::Tensor tensor, int64_t root,
                         Mode mode = Mode::kAsync) = 0;
  // `peer` is a rank of the group; messages with the same tag keep their order.
  // Sends that cross never block each other.
  virtual Work send(at::Tensor tensor, int64_t peer, int64_t tag = 0) = 0;
  virtual Work recv(at::Tensor tensor, int64_t peer, int64_t tag = 0) = 0;
  // Blocks until every rank of the group has called it.
  virtual void barrier() = 0;
  // On backends that compare what was called now and then: at once. Errors: the
  // verdict, where ranks differ. Comm: there two barriers, and what compares.
  virtual void compare_calls() {}

  // A CPU tensor, not initialised; on shm in registered memory, which this and
  // every other group of the rank reduces and moves where it lies, without a
  // copy. It cannot be resized.
  virtual at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) = 0;

  virtual std::vector<VerbStats> stats() const = 0;
  virtual void reset_stats() = 0;
  // The last operations, oldest first, one a line.
  virtual std::string flight_record() const = 0;
};

// A tensor of zeros with these options: group.empty() where they say CPU.
at::Tensor zeros(Group& group, at::IntArrayRef sizes,
                 const at::TensorOptions& options);

}  // namespace tessera::comm
