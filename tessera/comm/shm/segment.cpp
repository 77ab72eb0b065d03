#include "tessera/comm/shm/segment.h"

#include <c10/core/ScalarType.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>

#include "tessera/comm/shm/memory_file.h"
#include "tessera/core/error.h"

namespace tessera::comm::shm {
namespace {

constexpr uint64_t kMagic = 0x31304d4853535354;  // "TSSSHM01"
constexpr const char* kSegmentKey = "segment";

struct alignas(64) Header {
  uint64_t magic;
  uint64_t nonce;  // also in the store: the file opened is the file meant
  Word attached;
  alignas(64) std::atomic<int64_t> first_failed;  // its rank + 1, or 0
};

size_t align_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Lines of its own: it is written by one rank while another's is read.
size_t splits_stride(size_t size) {
  return align_up(2 * size * sizeof(int64_t), 64);
}

// Where each part lies, for a group of `size` ranks.
struct Offsets {
  explicit Offsets(size_t size) {
    lanes = sizeof(Header);
    splits = lanes + size * sizeof(Lane);
    channels = align_up(splits + size * 2 * splits_stride(size), 4096);
    stages = align_up(channels + size * size * sizeof(Channel), 4096);
    end = stages + size * 2 * kStageBytes;
  }
  size_t lanes, splits, channels, stages, end;
};

Header& header_of(const Mapping& mapping) {
  return *reinterpret_cast<Header*>(mapping.base());
}

// The segments that threads of this process made, for its other ranks: they see
// each other's words at one address (as ThreadSanitizer must, too).
class OwnSegments {
 public:
  void add(uint64_t nonce, const std::shared_ptr<Mapping>& mapping) {
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [](const auto& one) { return one.second.expired(); });
    all_[nonce] = mapping;
  }
  std::shared_ptr<Mapping> find(uint64_t nonce) {
    const std::lock_guard lock(mutex_);
    const auto found = all_.find(nonce);
    return found == all_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<Mapping>> all_;
};

OwnSegments& own_segments() {
  static auto* const kSegments = new OwnSegments;
  return *kSegments;
}

void copy_text(decltype(Lane::why)& to, const std::string& text) {
  const size_t count = std::min(text.size(), to.size() - 1);
  std::memcpy(to.data(), text.data(), count);
  to[count] = '\0';
}

}  // namespace

int64_t monotonic_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

std::string Call::describe() const {
  std::ostringstream text;
  text << name_of(verb);
  if (reduces(verb)) text << '(' << name_of(op) << ')';
  text << " #" << sequence;
  if (verb == Verb::kBarrier) return text.str();
  text << " of ";
  if (verb != Verb::kAllToAll) text << numel << ' ';
  text << c10::getDtypeNames(dtype).first;
  if (verb == Verb::kBroadcast) text << " from group rank " << root;
  return text.str();
}

void PackedCall::store(const Call& call) {
  words[0].store(call.sequence, std::memory_order_relaxed);
  words[1].store(static_cast<uint64_t>(call.numel), std::memory_order_relaxed);
  words[2].store(static_cast<uint64_t>(call.verb) |
                     static_cast<uint64_t>(call.op) << 8 |
                     static_cast<uint64_t>(call.dtype) << 16 |
                     static_cast<uint64_t>(call.root + 1) << 32,
                 std::memory_order_relaxed);
}

Call PackedCall::load() const {
  const uint64_t packed = words[2].load(std::memory_order_relaxed);
  return {
      .sequence = words[0].load(std::memory_order_relaxed),
      .verb = static_cast<Verb>(packed & 0xff),
      .op = static_cast<ReduceOp>(packed >> 8 & 0xff),
      .dtype = static_cast<at::ScalarType>(packed >> 16 & 0xff),
      .root = static_cast<int64_t>(packed >> 32) - 1,
      .numel = static_cast<int64_t>(words[1].load(std::memory_order_relaxed))};
}

Segment::Segment(Rendezvous rendezvous, Place place)
    : place_(std::move(place)) {
  const auto end = std::chrono::steady_clock::now() + place_.timeout;
  if (place_.rank == 0) {
    create(rendezvous);
  } else {
    attach(rendezvous);
  }
  own_lane().pid = getpid();
  own_lane().cores = allowed_cores();
  own_lane().since_ns = monotonic_ns();
  own_lane().state = static_cast<uint32_t>(State::kPresent);
  own_lane().own_address = reinterpret_cast<char*>(&own_lane());
  meet(rendezvous, end);
  file_.reset();
  count_cores();
  watch_peers();
  try_reading_peers();
  meet(rendezvous, end);
  can_read_peers_ = true;
  for (int64_t r = 0; r < place_.size(); ++r) {
    can_read_peers_ = can_read_peers_ && lane(r).reads_peers;
  }
}

Segment::~Segment() {
  watched_.clear();
  auto expected = static_cast<uint32_t>(State::kPresent);
  own_lane().state.compare_exchange_strong(
      expected, static_cast<uint32_t>(State::kClosed));
  wake_all_ranks();
}

void Segment::create(Rendezvous& rendezvous) {
  const size_t bytes = Offsets(place_.ranks.size()).end;
  file_.reset(make_memory_file(place_.group, bytes,
                               c10::str("make the group '", place_.group,
                                        "' of ", place_.size(), " ranks"))
                  .release());
  mapping_ = std::make_shared<Mapping>();
  TS_CHECK(mapping_->map(file_.get(), bytes), "cannot map ", bytes,
           " bytes of shared memory: ", std::strerror(errno));
  lay_out();
  Header& header = header_of(*mapping_);
  header.magic = kMagic;
  header.nonce = random_nonce();
  own_segments().add(header.nonce, mapping_);
  rendezvous.set(kSegmentKey,
                 c10::str(getpid(), " ", file_.get(), " ", header.nonce));
}

void Segment::attach(Rendezvous& rendezvous) {
  std::istringstream text(rendezvous.get(
      kSegmentKey, place_.timeout,
      c10::str("rank ", place_.ranks[0],
               " to make the shared memory of group '", place_.group, "'")));
  pid_t pid = 0;
  int fd = -1;
  uint64_t nonce = 0;
  text >> pid >> fd >> nonce;
  const std::string owner = c10::str("rank ", place_.ranks[0]);
  if (pid == getpid()) mapping_ = own_segments().find(nonce);
  if (!mapping_) {
    mapping_ = std::make_shared<Mapping>();
    map_file_of(pid, fd, Offsets(place_.ranks.size()).end, owner, *mapping_);
  }
  const Header& header = header_of(*mapping_);
  TS_CHECK_REACH(header.magic == kMagic && header.nonce == nonce, "file ", fd,
                 " of process ", pid, " is not the shared memory of ", owner,
                 ". Do the ranks share the PID namespace?");
  lay_out();
}

void Segment::lay_out() {
  const Offsets offsets(place_.ranks.size());
  lanes_ = reinterpret_cast<Lane*>(mapping_->base() + offsets.lanes);
  splits_ = mapping_->base() + offsets.splits;
  channels_ = mapping_->base() + offsets.channels;
  stages_ = mapping_->base() + offsets.stages;
}

void Segment::meet(Rendezvous& rendezvous,
                   std::chrono::steady_clock::time_point end) {
  const uint32_t step = ++own_lane().steps;
  Word& attached = header_of(*mapping_).attached;
  ring(attached);
  const auto count = step * static_cast<uint32_t>(place_.size());
  const auto ready = [&] { return attached.value.load() >= count; };
  Waiter(/*may_spin=*/false).wait(attached, ready, [&] {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    rendezvous.check_no_failure(std::max(left, std::chrono::milliseconds(1)));
    for (int64_t r = 0; ended_ && r < place_.size(); ++r) {
      // A peer may come and leave: look at its steps after its end.
      const auto loss = loss_of(r);
      TS_CHECK_REACH(!loss || lane(r).steps >= step, "group '", place_.group,
                     "': ", *loss, ".");
    }
    TS_CHECK_REACH(ready() || std::chrono::steady_clock::now() < end, "group '",
                   place_.group, "': no sign of rank(s) ", ranks_before(step),
                   " within ", place_.timeout.count(), " ms.");
  });
}

std::string Segment::ranks_before(uint32_t step) const {
  std::string ranks;
  for (int64_t r = 0; r < place_.size(); ++r) {
    if (lane(r).steps >= step) continue;
    ranks += c10::str(ranks.empty() ? "" : ", ", place_.ranks[r]);
  }
  return ranks;
}

void Segment::watch_peers() {
  ended_ = std::make_unique<std::atomic<bool>[]>(place_.ranks.size());
  for (int64_t r = 0; r < place_.size(); ++r) {
    const pid_t pid = lane(r).pid;
    if (pid == getpid()) continue;
    is_one_process_ = false;
    watched_.push_back(watch_process(pid, [this, r] {
      ended_[r] = true;
      wake_all_ranks();
    }));
  }
}

void Segment::count_cores() {
  std::vector<cpu_set_t> members;
  for (int64_t r = 0; r < place_.size(); ++r) members.push_back(lane(r).cores);
  ranks_have_cores_ = have_cores(members, place_.ranks_on_host);
}

// A container or a security module may forbid it, though memory is shared.
void Segment::try_reading_peers() {
  bool reads = true;
  for (int64_t r = 0; r < place_.size() && reads; ++r) {
    if (lane(r).pid == getpid()) continue;
    const char* theirs = lane(r).own_address;
    Word seen{};
    reads = copy_from_process(lane(r).pid, &seen, theirs, sizeof(seen));
  }
  own_lane().reads_peers = reads;
}

bool copy_from_process(pid_t pid, void* to, const char* from, int64_t bytes) {
  while (bytes > 0) {
    const iovec local{to, static_cast<size_t>(bytes)};
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): iovec asks for it.
    const iovec remote{const_cast<char*>(from), static_cast<size_t>(bytes)};
    const ssize_t copied = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (copied <= 0) return false;
    to = static_cast<char*>(to) + copied;
    from += copied;
    bytes -= copied;
  }
  return true;
}

char* Segment::stage(int64_t rank, int half) const {
  return stages_ + (rank * 2 + half) * kStageBytes;
}

std::atomic<int64_t>* Segment::splits(int64_t rank, int parity) const {
  return reinterpret_cast<std::atomic<int64_t>*>(
      splits_ + (rank * 2 + parity) * splits_stride(place_.ranks.size()));
}

Channel& Segment::channel(int64_t from, int64_t to) const {
  return reinterpret_cast<Channel*>(channels_)[from * place_.size() + to];
}

void Segment::fail(const std::string& why) {
  std::lock_guard lock(failing_);
  if (own_lane().state == static_cast<uint32_t>(State::kFailed)) return;
  copy_text(own_lane().why, why);
  own_lane().state = static_cast<uint32_t>(State::kFailed);
  int64_t none = 0;
  header_of(*mapping_).first_failed.compare_exchange_strong(none,
                                                            place_.rank + 1);
  wake_all_ranks();
}

void Segment::wake_all_ranks() {
  for (int64_t r = 0; r < place_.size(); ++r) {
    wake_all(lane(r).arrival);
    wake_all(lane(r).bell);
  }
}

std::optional<std::string> Segment::failure() const {
  const int64_t first =
      header_of(*mapping_).first_failed.load(std::memory_order_acquire);
  if (first == 0) return std::nullopt;
  return c10::str("rank ", place_.ranks[first - 1],
                  " failed: ", lane(first - 1).why.data());
}

std::optional<std::string> Segment::loss_of(int64_t rank) const {
  if (lane(rank).state == static_cast<uint32_t>(State::kClosed)) {
    return c10::str("rank ", place_.ranks[rank], " has left the group");
  }
  if (!ended_[rank]) return std::nullopt;
  return c10::str("rank ", place_.ranks[rank], " (pid ", lane(rank).pid,
                  ") has died");
}

std::optional<std::string> Segment::last_call_of(int64_t rank) const {
  const Lane& lane = this->lane(rank);
  if (lane.begun == 0) return std::nullopt;
  const double ago = 1e-9 * static_cast<double>(monotonic_ns() - lane.since_ns);
  const uint64_t begun = lane.begun;
  const Call call = lane.calls[lane.arrival.value % 2].load();
  // What it is, a rank tells at its first meeting in it.
  const std::string what = call.sequence == begun
                               ? call.describe()
                               : c10::str("collective #", begun);
  return begun == lane.finished
             ? c10::str("last did ", what, ", ", ago, " s ago")
             : c10::str("is in ", what, ", for ", ago, " s");
}

}  // namespace tessera::comm::shm
