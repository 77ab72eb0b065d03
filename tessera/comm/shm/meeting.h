// The points at which the ranks of a group meet: every collective is made of
// copies and reductions between them.
//
// Whoever has passed meeting k knows that all have arrived at it: that what
// they wrote before it can be read, and that they are done with what they read
// before it. At each meeting the ranks compare what they do (Call): different
// verbs, sizes, dtypes or reductions are an error, never a wrong sum.
//
// Threads: one at a time.
// Errors: c10::DistBackendError where a peer died, left or failed, or time is
//         up, naming who is missing and what it did last; TS_CHECK where ranks
//         disagree. The group adds its names.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "tessera/comm/base/reduce.h"
#include "tessera/comm/shm/segment.h"

namespace tessera::comm::shm {

// How far away the other cores are, as the loads of lines show that a peer has
// just written.
class Distance {
 public:
  void sample(const std::atomic<uint64_t>& written_by_peer);
  // By the median of the last samples; near as long as there are none.
  bool is_far() const { return assumed().value_or(far_); }
  // For tests, before there are ranks: what all of them take for true.
  static std::optional<bool>& assumed();

 private:
  static constexpr size_t kSamples = 9;
  std::array<int32_t, kSamples> ns_{};
  size_t next_ = 0;
  bool far_ = false;
};

class Meeting {
 public:
  explicit Meeting(Segment& segment);

  // A collective, from its begin to its end, as peers see it.
  class Scope {
   public:
    Scope(Meeting& meeting, Call call);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Meeting& meeting_;
  };

  void meet();
  // The same, and a look how far the first peer is: always, or at every eighth
  // call and at its first meeting.
  void meet_and_look(bool always);
  bool is_far() const { return distance_.is_far(); }

 private:
  void wait_for(int64_t peer);
  bool has_arrived(int64_t peer) const;
  void check_no_failure() const;
  void check_peers();
  void compare_call(int64_t peer) const;
  std::string missing_peers() const;

  Segment& segment_;
  const int64_t rank_;
  const int64_t size_;
  Waiter waiter_;
  Distance distance_;
  Call call_;
  uint64_t sequence_ = 0;
  uint32_t looks_ = 0;
  uint32_t meeting_ = 0;
  Waited waited_;  // since this rank arrived
};

}  // namespace tessera::comm::shm
