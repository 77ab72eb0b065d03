// What a group did last, and how much went through it.
//
// Threads: any; operations begin on the caller's thread and end on a backend's.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/base/busy_time.h"
#include "tessera/comm/verb.h"

namespace tessera::comm {

// One call on a group, as this rank made it.
struct Operation {
  Verb verb = Verb::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  at::ScalarType dtype = at::kByte;
  at::DimVector shape = {};  // of the larger of in and out
  at::Device device = at::kCPU;
  int64_t bytes = 0;
  int64_t peer = -1;  // global rank: root, source or destination
  int64_t tag = 0;
  // Collectives are counted from 1, the same on every rank; messages apart.
  uint64_t sequence = 0;
  std::chrono::steady_clock::time_point begun = {};
  int64_t step = -1;       // of the training, and what the rank was doing in it
  std::string doing = {};  // "Forward 3 unit 1"

  double seconds_so_far() const;
  // "all_reduce(sum) #17 float32[4, 8]", "send #3 to rank 2 tag 0 int64[5]"
  std::string describe() const;
  // Of a collective: a hash of what its ranks must call alike (verb, reduction,
  // dtype, root and elements; to all_to_all each brings its own number), and
  // of the signature of what went before.
  uint64_t signature(uint64_t before = 0) const;
};

class FlightRecorder {
 public:
  enum class State { kPending, kDone, kFailed, kRefused };
  // An operation as others read of it.
  struct Record {
    uint64_t sequence = 0;
    bool collective = true;
    std::string what;       // Operation::describe()
    std::string signature;  // Operation::signature(), in hex
    State state = State::kPending;
    double seconds = 0.0;      // that it took, or has taken so far
    double seconds_ago = 0.0;  // since it began
    int64_t step = -1;
    std::string doing;
  };

  // `busy`: that of the rank, which all its groups share; or none.
  explicit FlightRecorder(std::shared_ptr<BusyTime> busy = {})
      : busy_(std::move(busy)) {}

  // Gives the operation its sequence number and its begin; returns its ticket.
  uint64_t begin(Operation& operation);
  // `seconds`: that it took; none: since it began.
  void end(uint64_t ticket, bool failed, std::optional<double> seconds = {});

  // Of the last one, which the backend has refused: the next has its number.
  void take_back(uint64_t ticket);

  std::vector<VerbStats> stats() const;  // of the verbs that were called
  void reset_stats();
  std::string text() const;
  // The last `most` of them, oldest first.
  std::vector<Record> records(size_t most = kEntries) const;

 private:
  static constexpr uint64_t kEntries = 256;
  struct Entry {
    Operation operation;
    State state = State::kPending;
    double seconds = 0.0;
    uint64_t ticket = 0;
  };

  void leave(const Entry& entry) const {
    if (busy_ && entry.state == State::kPending) busy_->end();
  }

  std::shared_ptr<BusyTime> busy_;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;  // a ring, by ticket
  uint64_t tickets_ = 0;
  uint64_t collectives_ = 0;
  uint64_t messages_ = 0;
  std::array<VerbStats, kNumVerbs> stats_;
};

}  // namespace tessera::comm
