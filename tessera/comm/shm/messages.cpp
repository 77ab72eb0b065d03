#include "tessera/comm/shm/messages.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>

#include "tessera/comm/detail/timed_out.h"
#include "tessera/core/error.h"

namespace tessera::comm::shm {
namespace {

// The writer's and the reader's end of a channel: as many bytes as there is
// room, or as there are. The counts only grow; their difference is in flight.
int64_t room_in(const Channel& channel) {
  return kChannelBytes -
         static_cast<int64_t>(channel.written.load(std::memory_order_relaxed) -
                              channel.read.load(std::memory_order_acquire));
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
  channel.read.store(read + count, std::memory_order_release);
}

std::string elements(int64_t numel, at::ScalarType dtype) {
  return c10::str(numel, " ", c10::getDtypeNames(dtype).first);
}

}  // namespace

bool Messages::Peer::pending() const {
  return !sends.empty() || !receives.empty() ||
         std::any_of(arrivals.begin(), arrivals.end(),
                     [](const Arrival& a) { return a.receive.has_value(); });
}

Messages::Messages(Segment& segment,
                   std::function<void(const std::string&)> on_failure)
    : segment_(segment),
      rank_(segment.place().rank),
      waiter_(segment.ranks_have_cores()),
      on_failure_(std::move(on_failure)),
      peers_(segment.place().ranks.size()) {}

Messages::~Messages() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Messages::submit(Transfer transfer) {
  {
    std::lock_guard lock(mutex_);
    submitted_.push_back(std::move(transfer));
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  }
  changed_.notify_one();
  ring(segment_.own_lane().bell);
}

void Messages::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return closing_ || !submitted_.empty(); });
    if (submitted_.empty()) return;
    lock.unlock();
    try {
      run_pending();
    } catch (const std::exception&) {
      fail_all(std::current_exception());
    }
    lock.lock();
  }
}

void Messages::run_pending() {
  Word& bell = segment_.own_lane().bell;
  do {
    const uint32_t seen = bell.value.load();
    take_submitted();
    claim_arrivals();
    const bool moved = progress();
    // Also while others keep the bell ringing.
    const auto now = std::chrono::steady_clock::now();
    if (now - checked_at_ > std::chrono::milliseconds(Waiter::kSliceMs)) {
      checked_at_ = now;
      check_peers();
    }
    if (moved || !pending()) continue;
    waiter_.wait(
        bell, [&] { return bell.value.load() != seen || !pending(); },
        [&] { check_peers(); });
  } while (pending());
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
      transfer.work->complete(failure_);
      continue;
    }
    if (transfer.peer == kAnyPeer) {
      any_since_ = std::chrono::steady_clock::now();
      from_any_.push_back(std::move(transfer));
      continue;
    }
    Peer& peer = peers_[transfer.peer];
    peer.moved_at = std::chrono::steady_clock::now();
    (transfer.sends ? peer.sends : peer.receives)
        .push_back(std::move(transfer));
  }
}

bool Messages::progress() {
  bool moved = false;
  for (int64_t p = 0; p < segment_.place().size(); ++p) {
    if (p == rank_) continue;
    const bool pushed = push(p);
    const bool pulled = pull(p);
    if (!pushed && !pulled) continue;
    peers_[p].moved_at = std::chrono::steady_clock::now();
    ring(segment_.lane(p).bell);
    moved = true;
  }
  return moved;
}

bool Messages::push(int64_t to) {
  Peer& peer = peers_[to];
  Channel& channel = segment_.channel(rank_, to);
  bool moved = false;
  while (!peer.sends.empty()) {
    Transfer& send = peer.sends.front();
    const at::Tensor& tensor = send.tensor;
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (!peer.envelope_sent) {
      const Envelope envelope{
          .tag = send.tag,
          .numel = tensor.numel(),
          .dtype = static_cast<int64_t>(tensor.scalar_type()),
          .bytes = bytes};
      if (room_in(channel) < static_cast<int64_t>(sizeof(envelope))) break;
      write_to(channel, &envelope, sizeof(envelope));
      peer.envelope_sent = moved = true;
      peer.sent = 0;
    }
    const int64_t count = std::min(room_in(channel), bytes - peer.sent);
    if (count > 0) {
      write_to(channel, static_cast<char*>(tensor.data_ptr()) + peer.sent,
               count);
      peer.sent += count;
      moved = true;
    }
    if (peer.sent < bytes) break;
    send.work->complete(nullptr);
    peer.sends.pop_front();
    peer.envelope_sent = false;
  }
  return moved;
}

bool Messages::pull(int64_t from) {
  Peer& peer = peers_[from];
  Channel& channel = segment_.channel(from, rank_);
  bool moved = false;
  while (true) {
    const bool is_moving =
        !peer.arrivals.empty() && !peer.arrivals.back().complete();
    if (!is_moving) {
      Envelope envelope;
      if (bytes_in(channel) < static_cast<int64_t>(sizeof(envelope))) break;
      read_from(channel, &envelope, sizeof(envelope));
      begin_arrival(from, envelope);
      moved = true;
    }
    Arrival& arrival = peer.arrivals.back();
    const int64_t count =
        std::min(bytes_in(channel), arrival.envelope.bytes - arrival.moved);
    if (count > 0) {
      char* target =
          arrival.aside.empty()
              ? static_cast<char*>(arrival.receive->tensor.data_ptr())
              : arrival.aside.data();
      read_from(channel, target + arrival.moved, count);
      arrival.moved += count;
      moved = true;
    }
    if (!arrival.complete()) break;
    if (arrival.receive) deliver(peer, std::prev(peer.arrivals.end()));
  }
  return moved;
}

void Messages::begin_arrival(int64_t from, const Envelope& envelope) {
  Arrival& arrival = peers_[from].arrivals.emplace_back();
  arrival.envelope = envelope;
  if (claim(from, arrival)) return;
  arrival.aside.resize(static_cast<size_t>(envelope.bytes));
}

// Gives what lies aside to the receives that were submitted since.
void Messages::claim_arrivals() {
  for (int64_t p = 0; p < segment_.place().size(); ++p) {
    Peer& peer = peers_[p];
    for (auto it = peer.arrivals.begin(); it != peer.arrivals.end();) {
      const auto arrival = it++;
      if (arrival->receive || !claim(p, *arrival)) continue;
      if (arrival->complete()) deliver(peer, arrival);
    }
  }
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
  if (!arrival->aside.empty()) {
    std::memcpy(arrival->receive->tensor.data_ptr(), arrival->aside.data(),
                arrival->aside.size());
  }
  arrival->receive->work->complete(nullptr);
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
  const auto now = std::chrono::steady_clock::now();
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
void Messages::check_any(std::chrono::steady_clock::time_point now) {
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
  for (Transfer& receive : from_any_) receive.work->complete(failure_);
  from_any_.clear();
  for (Peer& peer : peers_) {
    for (Transfer& send : peer.sends) send.work->complete(failure_);
    for (Transfer& receive : peer.receives) receive.work->complete(failure_);
    for (Arrival& arrival : peer.arrivals) {
      if (arrival.receive) arrival.receive->work->complete(failure_);
    }
    peer = Peer();
  }
  take_submitted();
}

}  // namespace tessera::comm::shm
