// A rank's answer to the failure of another one.
//
// A thread looks at the store now and then; when a rank has said there that it
// failed, it puts this rank's report beside it, whatever the rank is doing,
// with what its thread stands in. The rank that failed gathers the reports and
// comes to one verdict: who is missing, what it did last, who does something
// else.
//
// It also watches whether the next rank lives and the store answers: where one
// of them is silent for too long, this rank's operations fail.
//
// Comm:    a key a rank when it is made, one look every kLook; what
//          NextRankWatch does; a report a rank when one has failed.
// Files:   flight-rank-N.json in the record folder: the last operations of each
//          rank, when one has failed, and the stacks of the others.
// Threads: any.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "tessera/comm/base/rendezvous.h"
#include "tessera/comm/base/report.h"

namespace tessera::comm {

struct SentinelOptions {
  int64_t rank = 0, world_size = 1;
  // See CommunicatorOptions.
  std::string record_folder = {};
  std::chrono::milliseconds silence = std::chrono::milliseconds(0);
  // Both are called on the sentinel's threads, and never after it has ended.
  std::function<RankReport()> report;
  // A rank is lost, or the store, which then tells nobody.
  std::function<void(const std::string& why, bool store_answers)> lost = {};
};

class Sentinel {
 public:
  // Made by the thread whose stack is told.
  Sentinel(Rendezvous rendezvous, SentinelOptions options);
  ~Sentinel();
  Sentinel(const Sentinel&) = delete;
  Sentinel& operator=(const Sentinel&) = delete;

  // What the destructor does; from then on nothing is called. `failed`: this
  // rank, in something that was not judged here.
  void close(bool failed = false);
  // This rank failed in an operation: writes its record, tells the others,
  // waits at most a second for what they report, and judges.
  std::string judge(const Question& question);
  // Writes this rank's record, where there is nothing to judge.
  void record();
  // Whether judge() has waited for the store in vain: others need not.
  bool store_is_silent() const;

 private:
  // Shared with threads that a silent store holds up, which are left behind.
  struct State;
  std::shared_ptr<State> state_;
  std::thread asks_, watches_;
};

}  // namespace tessera::comm
