// An operation of a group that is under way, and what it failed with, in the
// words for whoever waits for it.
#pragma once

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/comm/base/backend_group.h"
#include "tessera/comm/base/failure_note.h"
#include "tessera/comm/base/flight_recorder.h"
#include "tessera/core/error.h"

namespace tessera::comm {

struct GroupState {
  explicit GroupState(GroupInfo of)
      : info(std::move(of)), recorder(info.busy) {}

  GroupInfo info;
  bool names_peers = false;
  BackendGroup::Judge judge;
  FlightRecorder recorder;
  FailureNote failure;

  GroupReport report() const {
    return {
        .name = info.name, .ranks = info.ranks, .records = recorder.records()};
  }
  // Of the group, or of another one of the rank; "": none.
  std::string failure_so_far() const {
    const auto& whole = info.rank_failure;
    std::string text = whole ? whole->text() : "";
    return text.empty() ? failure.text() : text;
  }
};

// A Work whose backend knows how long the operation itself took.
class TimedWork {
 public:
  virtual ~TimedWork() = default;
  virtual double seconds() const = 0;  // REQUIRES: it is done
};

struct Failure {
  ExitCode code = ExitCode::kUnreachable;
  std::string text;
  bool timed_out = false;
  bool ranks_differ = false;  // in what they called before
};

Failure failure_of(const std::exception_ptr& error);
// "all_reduce(sum) #17 float32[4] on group 'dp' (2 ranks, shm): <cause> ...".
std::string explain(const GroupInfo& info, const Operation& operation,
                    const std::string& cause);
// With the ranks' verdict. REQUIRES: an exception is being handled: that of a
// pending operation.
[[noreturn]] void rethrow_explained(GroupState& state,
                                    const Operation& operation,
                                    uint64_t ticket);

struct BackendWork final : Work::Impl {
  std::shared_ptr<GroupState> state;
  Operation operation;
  uint64_t ticket = 0;
  c10::intrusive_ptr<c10d::Work> work;

  bool done() const override { return work->isCompleted(); }
  void wait() override;
  void synchronize() override;
  // The backend's thread tells when it is done, also where nobody waits. Of a
  // device nobody does: that thread comes to the verdict then.
  void watch_completion();
};

}  // namespace tessera::comm
