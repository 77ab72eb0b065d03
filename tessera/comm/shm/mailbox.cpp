#include "tessera/comm/shm/mailbox.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>

#include "tessera/comm/base/keep_for_ever.h"
#include "tessera/comm/base/timed_out.h"
#include "tessera/core/error.h"

namespace tessera::comm::shm {
namespace {

// About what a copy out of another process moves in a microsecond.
constexpr int64_t kCopiedBytesPerUs = 4 << 10;

std::string elements(int64_t numel, at::ScalarType dtype) {
  return c10::str(numel, " ", c10::getDtypeNames(dtype).first);
}

}  // namespace

bool Mailbox::Peer::pending() const {
  return has_to_send() || !lent.empty() || !receives.empty() ||
         std::any_of(arrivals.begin(), arrivals.end(),
                     [](const Arrival& a) { return a.receive.has_value(); });
}

Mailbox::Mailbox(Segment& segment, OnDone on_done, int64_t lend_bytes)
    : segment_(segment),
      rank_(segment.place().rank),
      lend_bytes_(lend_bytes),
      on_done_(std::move(on_done)),
      memory_(segment),
      peers_(segment.place().ranks.size()) {}

void Mailbox::take(Transfer transfer) {
  if (failure_) return on_done_(std::move(transfer), failure_);
  if (transfer.peer == kAnyPeer) {
    waited_for_any_.reset();
    from_any_.push_back(std::move(transfer));
    return;
  }
  Peer& peer = peers_[transfer.peer];
  peer.waited.reset();
  (transfer.sends ? peer.sends : peer.receives).push_back(std::move(transfer));
}

bool Mailbox::pending() const {
  return !from_any_.empty() ||
         std::any_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.pending(); });
}

bool Mailbox::progress() {
  if (failure_) return false;
  return claim_arrivals() || move() || take_aside();
}

std::chrono::nanoseconds Mailbox::patience() const {
  const int64_t at = aside_at_ns_;
  if (at == kNever) return Waiter::kSlice;
  const Clock::time_point then{std::chrono::nanoseconds(at)};
  return std::clamp<std::chrono::nanoseconds>(
      then - Clock::now(), std::chrono::nanoseconds(0), Waiter::kSlice);
}

bool Mailbox::move() {
  bool moved = false;
  for (int64_t p = 0; p < segment_.place().size(); ++p) {
    if (p == rank_) continue;
    const bool pulled = pull(p);
    const bool pushed = push(p);
    if (!pushed && !pulled) continue;
    peers_[p].waited.reset();
    moved = true;
    std::atomic<bool>& wants_room = segment_.channel(p, rank_).wants_room;
    const bool made_room = wants_room.load() && wants_room.exchange(false);
    if (pushed || made_room) ring(segment_.lane(p).bell);
  }
  return moved;
}

bool Mailbox::push(int64_t to) {
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
bool Mailbox::push_next(int64_t to) {
  Peer& peer = peers_[to];
  Channel& channel = segment_.channel(rank_, to);
  if (peer.envelope_sent) return push_bytes(peer, channel);
  if (channel.room() < static_cast<int64_t>(sizeof(Envelope))) return false;
  if (!peer.taken.empty()) {
    const Envelope envelope{.kind = Kind::kTaken, .id = peer.taken.front()};
    channel.write(&envelope, sizeof(envelope));
    peer.taken.pop_front();
    return true;
  }
  Transfer& send = peer.sends.front();
  const Envelope envelope = envelope_of(send, peer.num_lent);
  channel.write(&envelope, sizeof(envelope));
  if (envelope.kind == Kind::kLent) {
    peer.lent.emplace_back(peer.num_lent++, std::move(send));
    peer.sends.pop_front();
    return true;
  }
  peer.envelope_sent = true;
  peer.sent = 0;
  return true;
}

Mailbox::Envelope Mailbox::envelope_of(const Transfer& send,
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
bool Mailbox::push_bytes(Peer& peer, Channel& channel) {
  Transfer& send = peer.sends.front();
  const auto bytes = static_cast<int64_t>(send.tensor.nbytes());
  const int64_t count = std::min(channel.room(), bytes - peer.sent);
  if (count == 0 && bytes > 0) return false;
  if (count > 0) {
    channel.write(static_cast<char*>(send.tensor.data_ptr()) + peer.sent,
                  count);
  }
  peer.sent += count;
  if (peer.sent < bytes) return true;
  on_done_(std::move(send), nullptr);
  peer.sends.pop_front();
  peer.envelope_sent = false;
  return true;
}

bool Mailbox::pull(int64_t from) {
  Peer& peer = peers_[from];
  Channel& channel = segment_.channel(from, rank_);
  bool moved = false;
  while (true) {
    const int64_t there = channel.available();
    if (!peer.arrivals.empty() && peer.arrivals.back().is_in_channel()) {
      const auto arrival = std::prev(peer.arrivals.end());
      const int64_t count =
          std::min(there, arrival->envelope.bytes - arrival->moved);
      if (count == 0) break;
      channel.read(arrival->target() + arrival->moved, count);
      arrival->moved += count;
      if (arrival->complete() && arrival->receive) deliver(peer, arrival);
    } else {
      Envelope envelope;
      if (there < static_cast<int64_t>(sizeof(envelope))) break;
      channel.read(&envelope, sizeof(envelope));
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

void Mailbox::end_lending(Peer& to, uint64_t id) {
  const auto lent = std::find_if(to.lent.begin(), to.lent.end(),
                                 [&](const auto& l) { return l.first == id; });
  TORCH_INTERNAL_ASSERT(lent != to.lent.end(), "message ", id, " was not lent");
  on_done_(std::move(lent->second), nullptr);
  to.lent.erase(lent);
}

void Mailbox::begin_arrival(int64_t from, const Envelope& envelope) {
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
bool Mailbox::claim_arrivals() {
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
void Mailbox::settle(int64_t from, std::list<Arrival>::iterator arrival) {
  if (arrival->is_lent()) take_lent(from, *arrival);
  if (arrival->complete()) deliver(peers_[from], arrival);
}

void Mailbox::take_lent(int64_t from, Arrival& arrival) {
  const Envelope& envelope = arrival.envelope;
  memory_.copy_from(from, envelope.share, arrival.target(), 0, envelope.bytes);
  // A sender whose group failed has its tensor back: this may be no message.
  if (const auto failure = segment_.failure()) {
    C10_THROW_ERROR(DistBackendError, *failure);
  }
  arrival.moved = envelope.bytes;
  peers_[from].taken.push_back(envelope.id);
}

bool Mailbox::take_aside() {
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

std::optional<Transfer> Mailbox::take_receive(std::deque<Transfer>& receives,
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
bool Mailbox::claim(int64_t from, Arrival& arrival) {
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

void Mailbox::deliver(Peer& from, std::list<Arrival>::iterator arrival) {
  if (arrival->aside && arrival->envelope.bytes > 0) {
    std::memcpy(arrival->receive->tensor.data_ptr(), arrival->aside.get(),
                arrival->envelope.bytes);
  }
  on_done_(std::move(*arrival->receive), nullptr);
  from.arrivals.erase(arrival);
}

void Mailbox::check_fits(const Transfer& receive,
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
void Mailbox::check_peers() {
  if (const auto failure = segment_.failure()) {
    C10_THROW_ERROR(DistBackendError, *failure);
  }
  const auto now = Clock::now();
  if (!from_any_.empty()) check_any(now);
  for (int64_t p = 0; p < segment_.place().size(); ++p) {
    if (!peers_[p].pending()) continue;
    // A peer may send and leave: look for its bytes after its end.
    const auto loss = segment_.loss_of(p);
    if (loss && !move()) C10_THROW_ERROR(DistBackendError, *loss);
    if (peers_[p].waited.look(now) < segment_.place().timeout) continue;
    // Of a group that has messages alone its collectives say nothing.
    const auto last = segment_.last_call_of(p);
    throw TimedOut({__func__, __FILE__, __LINE__},
                   c10::str("timed out. Nothing moved to or from rank ",
                            segment_.place().ranks[p],
                            last ? c10::str(" (", *last, ")") : ""));
  }
}

// Any peer may still send: only when all are gone nobody will.
void Mailbox::check_any(Clock::time_point now) {
  std::string losses;
  int64_t num_lost = 0;
  for (int64_t p = 0; p < segment_.place().size(); ++p) {
    const auto loss = p == rank_ ? std::nullopt : segment_.loss_of(p);
    if (!loss) continue;
    losses += (num_lost++ > 0 ? "; " : "") + *loss;
  }
  if (num_lost == segment_.place().size() - 1 && !move()) {
    C10_THROW_ERROR(DistBackendError, losses);
  }
  if (waited_for_any_.look(now) < segment_.place().timeout) return;
  throw TimedOut({__func__, __FILE__, __LINE__},
                 c10::str("timed out. No rank sent a message with tag ",
                          from_any_.front().tag));
}

void Mailbox::fail(const std::exception_ptr& error) {
  failure_ = error;
  for (Transfer& receive : from_any_) on_done_(std::move(receive), failure_);
  from_any_.clear();
  for (Peer& peer : peers_) {
    for (Transfer& send : peer.sends) on_done_(std::move(send), failure_);
    for (auto& [id, send] : peer.lent) {
      keep_for_ever(new at::Tensor(send.tensor));  // its peer may copy it still
      on_done_(std::move(send), failure_);
    }
    for (Transfer& receive : peer.receives) {
      on_done_(std::move(receive), failure_);
    }
    for (Arrival& arrival : peer.arrivals) {
      if (arrival.receive) on_done_(std::move(*arrival.receive), failure_);
    }
    peer = Peer();
  }
  aside_at_ns_ = kNever;
}

}  // namespace tessera::comm::shm
