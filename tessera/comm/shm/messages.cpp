#include "tessera/comm/shm/messages.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>

#include "tessera/comm/detail/timed_out.h"
#include "tessera/core/error.h"

namespace tessera::comm::shm {
namespace {

// About what a copy out of another process moves in a microsecond.
constexpr int64_t kCopiedBytesPerUs = 4 << 10;

// The writer's and the reader's end of a channel: as many bytes as there is
// room, or as there are. The counts only grow; their difference is in flight.
int64_t room_in(const Channel& channel) {
  return kChannelBytes -
         static_cast<int64_t>(channel.written.load(std::memory_order_relaxed) -
                              channel.read.load());
}

int64_t bytes_in(const Channel& channel) {
  return static_cast<int64_t>(channel.written.load(std::memory_order_acquire) -
                              channel.read.load(std::memory_order_relaxed));
}

// REQUIRES: count <= room_in(channel).
void write_to(Channel& channel, const void* from, int64_t count) {
  const uint64_t written = channel.written.load(std::memory_order_relaxed);
  const auto at = static_cast<int64_t>(written % kChannelBytes);
  const int64_t first = std::min(count, kChannelBytes - at);
  std::memcpy(channel.bytes.data() + at, from, first);
  std::memcpy(channel.bytes.data(), static_cast<const char*>(from) + first,
              count - first);
  channel.written.store(written + count, std::memory_order_release);
}

// REQUIRES: count <= bytes_in(channel).
void read_from(Channel& channel, void* to, int64_t count) {
  const uint64_t read = channel.read.load(std::memory_order_relaxed);
  const auto at = static_cast<int64_t>(read % kChannelBytes);
  const int64_t first = std::min(count, kChannelBytes - at);
  std::memcpy(to, channel.bytes.data() + at, first);
  std::memcpy(static_cast<char*>(to) + first, channel.bytes.data(),
              count - first);
  channel.read.store(read + count);  // before wants_room is looked at
}

std::string elements(int64_t numel, at::ScalarType dtype) {
  return c10::str(numel, " ", c10::getDtypeNames(dtype).first);
}

}  // namespace

bool Messages::Peer::pending() const {
  return has_to_send() || !lent.empty() || !receives.empty() ||
         std::any_of(arrivals.begin(), arrivals.end(),
                     [](const Arrival& a) { return a.receive.has_value(); });
}

Messages::Messages(Segment& segment,
                   std::function<void(const std::string&)> on_failure,
                   int64_t lend_bytes)
    : segment_(segment),
      rank_(segment.place().rank),
      lend_bytes_(lend_bytes),
      waiter_(segment.ranks_have_cores()),
      on_failure_(std::move(on_failure)),
      memory_(segment),
      peers_(segment.place().ranks.size()) {}

void Messages::submit(Transfer transfer) {
  {
    std::lock_guard lock(mutex_);
    submitted_.push_back(std::move(transfer));
    pending_ = true;
  }
  advance();
}

void Messages::run_until_done(PendingWork& work) {
  advance_until([&] { return work.isCompleted(); });
}

void Messages::close() {
  advance_until([&] { return !pending_; });
  closed_ = true;
  ring(segment_.own_lane().bell);
  wake_all(segment_.own_lane().bell);
  if (thread_.joinable()) thread_.join();
  while (visitors_ > 0) std::this_thread::yield();
}

template <typename Done>
void Messages::advance_until(const Done& done) {
  ++visitors_;
  ++waiters_;
  while (!closed_) {
    Word& bell = segment_.own_lane().bell;
    const uint32_t seen = bell.value.load();
    advance();
    if (done()) break;
    waiter_.wait(
        bell,
        [&] { return bell.value.load() != seen || slice() <= slice().zero(); },
        [&] { advance(/*looks=*/true); }, slice());
  }
  // The thread goes on with what is left.
  if (--waiters_ == 0 && pending_ && !closed_) advance();
  --visitors_;
}

void Messages::loop() {
  Word& bell = segment_.own_lane().bell;
  bool looks = false;
  while (!closed_) {
    const uint32_t seen = bell.value.load();
    if (waiters_ == 0) advance(looks);
    doze(bell, seen, slice());
    looks = bell.value.load() == seen;
  }
}

// All of these are in one order: who finds it busy is heard by the one who is.
void Messages::advance(bool looks) {
  if (looks) looks_ = true;
  again_ = true;
  while (again_) {
    if (busy_.exchange(true)) return;
    again_ = false;
    try {
      step();
      count_thread();
    } catch (const std::exception&) {
      fail_all(std::current_exception());
    }
    const bool was_pending = update_pending();
    busy_ = false;
    // Only now: what hears of it may call back.
    const bool told = tell_done();
    const bool changed = told || (was_pending && !pending_);
    if (changed && waiters_ > 0) ring(segment_.own_lane().bell);
  }
}

void Messages::step() {
  take_submitted();
  if (failure_) return;  // what the channels hold is no message any more
  if (claim_arrivals() || progress() || take_aside()) {
    again_ = true;
    return;
  }
  const auto now = Clock::now();
  if (!looks_.exchange(false) && now - looked_at_ < Waiter::kSlice) return;
  looked_at_ = now;
  if (pending()) check_peers();
}

// Returns what it was.
bool Messages::update_pending() {
  std::lock_guard lock(mutex_);
  return pending_.exchange(pending() || !submitted_.empty());
}

// One by one: what hears of one may wait for the next. False: there was none.
bool Messages::tell_done() {
  bool told = false;
  while (true) {
    std::unique_lock lock(mutex_);
    if (done_.empty()) return told;
    const auto [transfer, error] = std::move(done_.front());
    done_.pop_front();
    lock.unlock();
    transfer.work->complete(error);
    told = true;
  }
}

// Whoever rang before the thread was counted has not woken it: one more look.
void Messages::count_thread() {
  const bool counts = waiters_ == 0 && pending();
  if (counts == thread_counts_) return;
  if (counts && !thread_.joinable()) {
    thread_ = std::thread([this] { loop(); });
  }
  thread_counts_ = counts;
  segment_.own_lane().bell.sleepers.fetch_add(counts ? 1 : -1);
  if (counts) again_ = true;
}

std::chrono::nanoseconds Messages::slice() const {
  const int64_t at = aside_at_ns_;
  if (at == kNever) return Waiter::kSlice;
  const Clock::time_point then{std::chrono::nanoseconds(at)};
  return std::clamp<std::chrono::nanoseconds>(
      then - Clock::now(), std::chrono::nanoseconds(0), Waiter::kSlice);
}

void Messages::complete(Transfer& transfer, const std::exception_ptr& error) {
  std::lock_guard lock(mutex_);
  done_.emplace_back(std::move(transfer), error);
}

bool Messages::pending() const {
  return !from_any_.empty() ||
         std::any_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.pending(); });
}

void Messages::take_submitted() {
  std::vector<Transfer> taken;
  {
    std::lock_guard lock(mutex_);
    taken.swap(submitted_);
  }
  for (Transfer& transfer : taken) {
    if (failure_) {
      complete(transfer, failure_);
      continue;
    }
    if (transfer.peer == kAnyPeer) {
      any_since_ = Clock::now();
      from_any_.push_back(std::move(transfer));
      continue;
    }
    Peer& peer = peers_[transfer.peer];
    peer.moved_at = Clock::now();
    (transfer.sends ? peer.sends : peer.receives)
        .push_back(std::move(transfer));
  }
}

bool Messages::progress() {
  bool moved = false;
  for (int64_t p = 0; p < segment_.place().size(); ++p) {
    if (p == rank_) continue;
    const bool pulled = pull(p);
    const bool pushed = push(p);
    if (!pushed && !pulled) continue;
    peers_[p].moved_at = Clock::now();
    moved = true;
    std::atomic<bool>& wants_room = segment_.channel(p, rank_).wants_room;
    const bool made_room = wants_room.load() && wants_room.exchange(false);
    if (pushed || made_room) ring(segment_.lane(p).bell);
  }
  return moved;
}

bool Messages::push(int64_t to) {
  const Peer& peer = peers_[to];
  Channel& channel = segment_.channel(rank_, to);
  bool moved = false;
  while (peer.has_to_send()) {
    if (!push_next(to)) {
      // Again: the reader may have made room before it could see this.
      channel.wants_room = true;
      if (!push_next(to)) break;
    }
    moved = true;
  }
  return moved;
}

// An envelope, or some bytes. False: there is no room.
// REQUIRES: has_to_send.
bool Messages::push_next(int64_t to) {
  Peer& peer = peers_[to];
  Channel& channel = segment_.channel(rank_, to);
  if (peer.envelope_sent) return push_bytes(peer, channel);
  if (room_in(channel) < static_cast<int64_t>(sizeof(Envelope))) return false;
  if (!peer.taken.empty()) {
    const Envelope envelope{.kind = Kind::kTaken, .id = peer.taken.front()};
    write_to(channel, &envelope, sizeof(envelope));
    peer.taken.pop_front();
    return true;
  }
  Transfer& send = peer.sends.front();
  const Envelope envelope = envelope_of(send, peer.num_lent);
  write_to(channel, &envelope, sizeof(envelope));
  if (envelope.kind == Kind::kLent) {
    peer.lent.emplace_back(peer.num_lent++, std::move(send));
    peer.sends.pop_front();
    return true;
  }
  peer.envelope_sent = true;
  peer.sent = 0;
  return true;
}

Messages::Envelope Messages::envelope_of(const Transfer& send,
                                         uint64_t id) const {
  const at::Tensor& tensor = send.tensor;
  Envelope envelope{.tag = send.tag,
                    .numel = tensor.numel(),
                    .dtype = static_cast<int64_t>(tensor.scalar_type()),
                    .bytes = static_cast<int64_t>(tensor.nbytes())};
  if (envelope.bytes <= lend_bytes_) return envelope;
  envelope.share = memory_.share_of(tensor.data_ptr());
  if (envelope.share.kind == Share::Kind::kNowhere) return envelope;
  envelope.kind = Kind::kLent;
  envelope.id = id;
  return envelope;
}

// Of the first send. False: there is no room.
bool Messages::push_bytes(Peer& peer, Channel& channel) {
  Transfer& send = peer.sends.front();
  const auto bytes = static_cast<int64_t>(send.tensor.nbytes());
  const int64_t count = std::min(room_in(channel), bytes - peer.sent);
  if (count == 0 && bytes > 0) return false;
  if (count > 0) {
    write_to(channel, static_cast<char*>(send.tensor.data_ptr()) + peer.sent,
             count);
  }
  peer.sent += count;
  if (peer.sent < bytes) return true;
  complete(send, nullptr);
  peer.sends.pop_front();
  peer.envelope_sent = false;
  return true;
}

bool Messages::pull(int64_t from) {
  Peer& peer = peers_[from];
  Channel& channel = segment_.channel(from, rank_);
  bool moved = false;
  while (true) {
    const int64_t there = bytes_in(channel);
    if (!peer.arrivals.empty() && peer.arrivals.back().is_in_channel()) {
      const auto arrival = std::prev(peer.arrivals.end());
      const int64_t count =
          std::min(there, arrival->envelope.bytes - arrival->moved);
      if (count == 0) break;
      read_from(channel, arrival->target() + arrival->moved, count);
      arrival->moved += count;
      if (arrival->complete() && arrival->receive) deliver(peer, arrival);
    } else {
      Envelope envelope;
      if (there < static_cast<int64_t>(sizeof(envelope))) break;
      read_from(channel, &envelope, sizeof(envelope));
      if (envelope.kind == Kind::kTaken) {
        end_lending(peer, envelope.id);
      } else {
        begin_arrival(from, envelope);
      }
    }
    moved = true;
    // The sender of a message that was copied shall hear of it now.
    if (!peer.taken.empty()) break;
  }
  return moved;
}

void Messages::end_lending(Peer& to, uint64_t id) {
  const auto lent = std::find_if(to.lent.begin(), to.lent.end(),
                                 [&](const auto& l) { return l.first == id; });
  TORCH_INTERNAL_ASSERT(lent != to.lent.end(), "message ", id, " was not lent");
  complete(lent->second, nullptr);
  to.lent.erase(lent);
}

void Messages::begin_arrival(int64_t from, const Envelope& envelope) {
  Peer& peer = peers_[from];
  peer.arrivals.push_back({.envelope = envelope});
  const auto arrival = std::prev(peer.arrivals.end());
  if (claim(from, *arrival)) return settle(from, arrival);
  if (envelope.kind == Kind::kBytes) {
    arrival->set_aside();
  } else {
    arrival->aside_at = Clock::now() + std::chrono::microseconds(
                                           envelope.bytes / kCopiedBytesPerUs);
  }
}

// Gives what is there to the receives that were submitted since. Returns after
// one that had to be copied: its sender shall hear of it.
bool Messages::claim_arrivals() {
  bool claimed = false;
  for (int64_t p = 0; p < segment_.place().size(); ++p) {
    Peer& peer = peers_[p];
    for (auto it = peer.arrivals.begin(); it != peer.arrivals.end();) {
      const auto arrival = it++;
      if (arrival->receive || !claim(p, *arrival)) continue;
      claimed = true;
      const bool copies = arrival->is_lent();
      settle(p, arrival);
      if (copies) return true;
    }
  }
  return claimed;
}

// What has just been asked for, as far as it is there.
void Messages::settle(int64_t from, std::list<Arrival>::iterator arrival) {
  if (arrival->is_lent()) take_lent(from, *arrival);
  if (arrival->complete()) deliver(peers_[from], arrival);
}

void Messages::take_lent(int64_t from, Arrival& arrival) {
  const Envelope& envelope = arrival.envelope;
  memory_.copy_from(from, envelope.share, arrival.target(), 0, envelope.bytes);
  // A sender whose group failed has its tensor back: this may be no message.
  if (const auto failure = segment_.failure()) {
    C10_THROW_ERROR(DistBackendError, *failure);
  }
  arrival.moved = envelope.bytes;
  peers_[from].taken.push_back(envelope.id);
}

bool Messages::take_aside() {
  Clock::time_point first = Clock::time_point::max();
  for (int64_t p = 0; p < segment_.place().size(); ++p) {
    for (Arrival& arrival : peers_[p].arrivals) {
      if (!arrival.is_lent()) continue;
      if (Clock::now() < arrival.aside_at) {
        first = std::min(first, arrival.aside_at);
        continue;
      }
      aside_at_ns_ = kNever;  // nobody shall look at the clock meanwhile
      arrival.set_aside();
      take_lent(p, arrival);
      return true;
    }
  }
  aside_at_ns_ = first.time_since_epoch().count();
  return false;
}

std::optional<Transfer> Messages::take_receive(std::deque<Transfer>& receives,
                                               int64_t tag) {
  const auto found =
      std::find_if(receives.begin(), receives.end(),
                   [&](const Transfer& waiting) { return waiting.tag == tag; });
  if (found == receives.end()) return std::nullopt;
  Transfer receive = std::move(*found);
  receives.erase(found);
  return receive;
}

// The first receive with the message's tag takes it: one that asked for this
// rank, else one that takes any.
bool Messages::claim(int64_t from, Arrival& arrival) {
  const int64_t tag = arrival.envelope.tag;
  auto receive = take_receive(peers_[from].receives, tag);
  if (!receive) receive = take_receive(from_any_, tag);
  if (!receive) return false;
  receive->peer = from;
  receive->work->set_source(static_cast<int>(from));
  // Fails all that is pending, this one among it.
  arrival.receive = std::move(*receive);
  check_fits(*arrival.receive, arrival.envelope);
  return true;
}

void Messages::deliver(Peer& from, std::list<Arrival>::iterator arrival) {
  if (arrival->aside && arrival->envelope.bytes > 0) {
    std::memcpy(arrival->receive->tensor.data_ptr(), arrival->aside.get(),
                arrival->envelope.bytes);
  }
  complete(*arrival->receive, nullptr);
  from.arrivals.erase(arrival);
}

void Messages::check_fits(const Transfer& receive,
                          const Envelope& envelope) const {
  const auto dtype = static_cast<at::ScalarType>(envelope.dtype);
  const at::Tensor& tensor = receive.tensor;
  if (dtype == tensor.scalar_type() && envelope.numel == tensor.numel()) return;
  const auto& ranks = segment_.place().ranks;
  TS_CHECK(false, "ranks disagree: rank ", ranks[rank_], " receives ",
           elements(tensor.numel(), tensor.scalar_type()), " from rank ",
           ranks[receive.peer], " with tag ", receive.tag, ", which sent ",
           elements(envelope.numel, dtype));
}

// Called while nothing moves: throws when waiting is of no use.
void Messages::check_peers() {
  if (const auto failure = segment_.failure()) {
    C10_THROW_ERROR(DistBackendError, *failure);
  }
  const auto now = Clock::now();
  if (!from_any_.empty()) check_any(now);
  for (int64_t p = 0; p < segment_.place().size(); ++p) {
    if (!peers_[p].pending()) continue;
    // A peer may send and leave: look for its bytes after its end.
    const auto loss = segment_.loss_of(p);
    if (loss && !progress()) C10_THROW_ERROR(DistBackendError, *loss);
    if (now - peers_[p].moved_at < segment_.place().timeout) continue;
    throw TimedOut({__func__, __FILE__, __LINE__},
                   c10::str("timed out. Nothing moved to or from rank ",
                            segment_.place().ranks[p], " (",
                            segment_.last_call_of(p), ")"));
  }
}

// Any peer may still send: only when all are gone nobody will.
void Messages::check_any(Clock::time_point now) {
  std::string losses;
  int64_t num_lost = 0;
  for (int64_t p = 0; p < segment_.place().size(); ++p) {
    const auto loss = p == rank_ ? std::nullopt : segment_.loss_of(p);
    if (!loss) continue;
    losses += (num_lost++ > 0 ? "; " : "") + *loss;
  }
  if (num_lost == segment_.place().size() - 1 && !progress()) {
    C10_THROW_ERROR(DistBackendError, losses);
  }
  if (now - any_since_ < segment_.place().timeout) return;
  throw TimedOut({__func__, __FILE__, __LINE__},
                 c10::str("timed out. No rank sent a message with tag ",
                          from_any_.front().tag));
}

void Messages::fail_all(const std::exception_ptr& error) {
  if (!failure_) {
    failure_ = error;
    on_failure_(message_of(error));
  }
  for (Transfer& receive : from_any_) complete(receive, failure_);
  from_any_.clear();
  for (Peer& peer : peers_) {
    for (Transfer& send : peer.sends) complete(send, failure_);
    for (auto& [id, send] : peer.lent) {
      lent_for_good_.push_back(send.tensor);
      complete(send, failure_);
    }
    for (Transfer& receive : peer.receives) complete(receive, failure_);
    for (Arrival& arrival : peer.arrivals) {
      if (arrival.receive) complete(*arrival.receive, failure_);
    }
    peer = Peer();
  }
  aside_at_ns_ = kNever;
  take_submitted();
}

}  // namespace tessera::comm::shm
