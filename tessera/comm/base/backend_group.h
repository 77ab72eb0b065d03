// A Group over any c10d::Backend: checks arguments, numbers and records the
// operations, and puts names into what fails.
#pragma once

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/base/failure_note.h"
#include "tessera/comm/base/flight_recorder.h"
#include "tessera/comm/base/report.h"
#include "tessera/comm/group.h"

namespace tessera::comm {

// A backend that is connected, and the way to fail it.
struct Connection {
  c10::intrusive_ptr<c10d::Backend> backend;
  // Makes what is pending fail, here and on the peers where the backend can.
  std::function<void(const std::string& why)> fail = [](const std::string&) {};
  // Waits for what is pending, as the backend's end does, while it can still
  // fail; a device's is waited for at its end alone. REQUIRES: nothing is
  // called behind it.
  std::function<void()> close = [] {};
  // Whether its own errors name the peers that are dead or missing.
  bool names_peers = false;
  // Whether it carries tensors of any device, and not the CPU's alone.
  bool any_device = false;
  // The kind of device whose tensors it carries beside those; kCPU: none.
  c10::DeviceType device = c10::kCPU;
  // Hear of every collective, and throw where the ranks differ: before it is
  // called, and when the backend has taken it.
  std::function<void(const Operation&)> before = {};
  std::function<void(const Operation&)> taken = {};
  // The next collective is compared, and the one behind it hears of it.
  std::function<void()> compare_next = {};
  // Memory that it moves without staging it; not initialised.
  std::function<at::Tensor(at::IntArrayRef, at::ScalarType)> empty =
      [](at::IntArrayRef sizes, at::ScalarType dtype) {
        return at::empty(sizes, dtype);
      };
};

struct GroupInfo {
  std::string name;
  std::string backend;
  std::vector<int64_t> ranks;  // global, ascending
  int64_t rank = 0;            // within the group
  std::chrono::milliseconds timeout;
  std::shared_ptr<BusyTime> busy = {};  // of the rank; none: not counted
  // Of the rank: operations of a device fail while nobody waits for them.
  std::shared_ptr<FailureNote> rank_failure = {};
  // Who counts as lost: why all that is pending fails.
  std::shared_ptr<FailureNote> lost = {};
};

// What outlives the group while an operation is pending.
struct GroupState;

class BackendGroup : public Group {
 public:
  struct Judge {
    // What the ranks together say of an operation that failed, or "".
    std::function<std::string(const Question& question)> verdict;
    // Keeps this rank's last operations, where there is nothing to ask.
    std::function<void()> record;
  };

  BackendGroup(GroupInfo info, Connection connection, Judge judge = {});
  ~BackendGroup() override;

  const std::string& name() const override;
  const std::string& backend() const override;
  const std::vector<int64_t>& ranks() const override;
  int64_t rank() const override;

  Work all_reduce(at::Tensor tensor, ReduceOp op, Mode mode) override;
  Work all_gather(at::Tensor output, at::Tensor input, Mode mode) override;
  Work reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                      Mode mode) override;
  Work all_to_all(at::Tensor output, at::Tensor input,
                  std::vector<int64_t> output_splits,
                  std::vector<int64_t> input_splits, Mode mode) override;
  Work broadcast(at::Tensor tensor, int64_t root, Mode mode) override;
  Work send(at::Tensor tensor, int64_t peer, int64_t tag) override;
  Work recv(at::Tensor tensor, int64_t peer, int64_t tag) override;
  void barrier() override;
  void compare_calls() override;

  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) override;

  std::vector<VerbStats> stats() const override;
  void reset_stats() override;
  std::string flight_record() const override;

  void fail(const std::string& why);
  // See Connection::close.
  void close();
  // Of its last operations; for any thread.
  std::function<GroupReport()> reporter() const;

 protected:
  // Whether the backend moves such a tensor; an undefined one is checked later.
  bool carries(const at::Tensor& tensor) const;

 private:
  using Pending = c10::intrusive_ptr<c10d::Work>;
  // Records the operation and starts it; kBlocking: until it is done.
  Work start(Operation operation, Mode mode,
             const std::function<Pending()>& call);
  Pending called(const std::function<Pending()>& call,
                 const Operation& operation, uint64_t ticket);
  void check_usable() const;
  void check_tensor(Verb verb, const char* what,
                    const at::Tensor& tensor) const;
  void check_pieces(Verb verb, const at::Tensor& whole,
                    const at::Tensor& piece) const;
  void check_peer(Verb verb, int64_t peer, int64_t tag) const;
  std::vector<int64_t> checked_splits(const char* what,
                                      const at::Tensor& tensor,
                                      std::vector<int64_t> splits) const;
  std::string where(Verb verb) const;

  std::shared_ptr<GroupState> state_;
  Connection connection_;
};

}  // namespace tessera::comm
