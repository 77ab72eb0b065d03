#include "tessera/comm/shm/meeting.h"

#include <algorithm>

#include "tessera/comm/base/timed_out.h"
#include "tessera/core/error.h"

namespace tessera::comm::shm {
namespace {

// Between the two states of a machine whose round trips were 60 to 105 ns or
// 280 to 490 ns: half of one, and some 20 ns for the clock.
constexpr int32_t kFarNs = 115;
constexpr uint32_t kLookEvery = 8;

// For people, who are told when a rank was last seen: to some milliseconds.
int64_t coarse_ns() { return monotonic_ns(CLOCK_MONOTONIC_COARSE); }

}  // namespace

void Distance::sample(const std::atomic<uint64_t>& written_by_peer) {
  const int64_t begin = monotonic_ns();
  static_cast<void>(written_by_peer.load(std::memory_order_acquire));
  // The clock reads its counter only once the load has its value.
  const int64_t took = monotonic_ns() - begin;
  ns_[next_++ % kSamples] =
      static_cast<int32_t>(std::min<int64_t>(took, INT32_MAX));
  auto sorted = ns_;
  const size_t count = std::min(next_, kSamples);
  std::nth_element(sorted.begin(), sorted.begin() + count / 2,
                   sorted.begin() + count);
  far_ = sorted[count / 2] > kFarNs;
}

std::optional<bool>& Distance::assumed() {
  static std::optional<bool> far;
  return far;
}

Meeting::Scope::Scope(Meeting& meeting, Call call) : meeting_(meeting) {
  meeting.check_no_failure();
  call.sequence = ++meeting.sequence_;
  meeting.call_ = call;
  Lane& lane = meeting.segment_.own_lane();
  lane.begun.store(call.sequence, std::memory_order_release);
  lane.since_ns.store(coarse_ns(), std::memory_order_release);
}

Meeting::Scope::~Scope() {
  Lane& lane = meeting_.segment_.own_lane();
  lane.finished.store(meeting_.sequence_, std::memory_order_release);
  lane.since_ns.store(coarse_ns(), std::memory_order_release);
}

Meeting::Meeting(Segment& segment)
    : segment_(segment),
      rank_(segment.place().rank),
      size_(segment.place().size()),
      waiter_(segment.ranks_have_cores()) {}

void Meeting::meet() {
  ++meeting_;
  Lane& lane = segment_.own_lane();
  lane.calls[meeting_ % 2].store(call_);
  post(lane.arrival, meeting_);
  waited_.reset();
  for (int64_t k = 1; k < size_; ++k) wait_for((rank_ + k) % size_);
}

void Meeting::meet_and_look(bool always) {
  // Written anew, so that the peers' load of it comes from here.
  if (always) {
    segment_.own_lane().begun.store(sequence_, std::memory_order_release);
  }
  meet();
  if (!always && ++looks_ % kLookEvery != 0) return;
  // Else peers may share a core, and its cache.
  if (!segment_.ranks_have_cores()) return;
  distance_.sample(segment_.lane((rank_ + 1) % size_).begun);
}

bool Meeting::has_arrived(int64_t peer) const {
  const uint32_t at =
      segment_.lane(peer).arrival.value.load(std::memory_order_acquire);
  return static_cast<int32_t>(at - meeting_) >= 0;
}

void Meeting::wait_for(int64_t peer) {
  waiter_.wait(
      segment_.lane(peer).arrival, [&] { return has_arrived(peer); },
      [&] { check_peers(); });
  compare_call(peer);
}

void Meeting::check_no_failure() const {
  if (const auto failure = segment_.failure()) {
    C10_THROW_ERROR(DistBackendError, *failure);
  }
}

// Called while a peer is waited for: throws when waiting is of no use.
void Meeting::check_peers() {
  check_no_failure();
  for (int64_t k = 1; k < size_; ++k) {
    const int64_t peer = (rank_ + k) % size_;
    // A peer may arrive and leave: look at its arrival after its end.
    const auto loss = segment_.loss_of(peer);
    if (loss && !has_arrived(peer)) {
      C10_THROW_ERROR(DistBackendError, *loss);
    }
  }
  if (waited_.look(Waited::Clock::now()) > segment_.place().timeout) {
    throw TimedOut({__func__, __FILE__, __LINE__},
                   c10::str("timed out. Not arrived: ", missing_peers()));
  }
}

void Meeting::compare_call(int64_t peer) const {
  const Call theirs = segment_.lane(peer).calls[meeting_ % 2].load();
  if (theirs == call_) return;
  const auto& ranks = segment_.place().ranks;
  TS_CHECK(false, "ranks disagree: rank ", ranks[rank_], " calls ",
           call_.describe(), ", but rank ", ranks[peer], " calls ",
           theirs.describe());
}

std::string Meeting::missing_peers() const {
  std::string text;
  for (int64_t r = 0; r < size_; ++r) {
    if (r == rank_ || has_arrived(r)) continue;
    text += c10::str(text.empty() ? "" : "; ", "rank ",
                     segment_.place().ranks[r], " (",
                     segment_.last_call_of(r).value_or(
                         "has called no collective on this group yet"),
                     ")");
  }
  return text;
}

}  // namespace tessera::comm::shm
