#include "tessera/comm/shm/collectives.h"

#include <algorithm>
#include <cstring>

#include "tessera/comm/detail/reduce.h"
#include "tessera/core/error.h"

namespace tessera::comm::shm {
namespace {

// Up to here all ranks reduce everything: one meeting instead of two.
constexpr int64_t kSliceFromBytes = 32 << 10;

int64_t bytes_of(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

void copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

// One collective: what peers see of it, from its begin to its end.
class Collectives::Scope {
 public:
  Scope(Collectives& owner, Call call) : owner_(owner) {
    owner.check_no_failure();
    call.sequence = ++owner.sequence_;
    owner.call_ = call;
    Lane& lane = owner.segment_.own_lane();
    lane.begun = call.sequence;
    lane.since_ns = monotonic_ns();
  }
  ~Scope() {
    Lane& lane = owner_.segment_.own_lane();
    lane.finished = owner_.sequence_;
    lane.since_ns = monotonic_ns();
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  Collectives& owner_;
};

Collectives::Collectives(Segment& segment)
    : segment_(segment),
      rank_(segment.place().rank),
      size_(segment.place().size()),
      spins_(spins_for(segment.place().ranks_on_host)) {}

void Collectives::all_reduce(void* data, int64_t numel, at::ScalarType dtype,
                             ReduceOp op) {
  Scope scope(
      *this,
      {.verb = Verb::kAllReduce, .op = op, .dtype = dtype, .numel = numel});
  const int64_t width = bytes_of(dtype);
  const int64_t step = kStageBytes / width;
  std::vector<const void*> pieces(size_);
  for (int64_t done = 0; done == 0 || done < numel; done += step) {
    const int64_t count = std::min(step, numel - done);
    char* part = static_cast<char*>(data) + done * width;
    copy(own_stage(), part, count * width);
    meet();
    const bool sliced = count * width > kSliceFromBytes;
    const auto begin = [&](int64_t r) {
      return sliced ? count * r / size_ : 0;
    };
    const int64_t first = begin(rank_);
    const int64_t last = sliced ? begin(rank_ + 1) : count;
    for (int64_t r = 0; r < size_; ++r) pieces[r] = stage_of(r) + first * width;
    char* result = (sliced ? own_stage() : part) + first * width;
    reduce(pieces, result, last - first, dtype, op);
    if (sliced) {
      meet();
      for (int64_t k = 0; k < size_; ++k) {
        const int64_t from = begin(peer(k)) * width;
        copy(part + from, stage_of(peer(k)) + from,
             begin(peer(k) + 1) * width - from);
      }
    }
    half_ ^= 1;
  }
}

void Collectives::all_gather(void* output, const void* input, int64_t numel,
                             at::ScalarType dtype) {
  Scope scope(*this,
              {.verb = Verb::kAllGather, .dtype = dtype, .numel = numel});
  const int64_t bytes = numel * bytes_of(dtype);
  for (int64_t done = 0; done == 0 || done < bytes; done += kStageBytes) {
    const int64_t count = std::min(kStageBytes, bytes - done);
    copy(own_stage(), static_cast<const char*>(input) + done, count);
    meet();
    for (int64_t k = 0; k < size_; ++k) {
      copy(static_cast<char*>(output) + peer(k) * bytes + done,
           stage_of(peer(k)), count);
    }
    half_ ^= 1;
  }
}

void Collectives::reduce_scatter(void* output, const void* input, int64_t numel,
                                 at::ScalarType dtype, ReduceOp op) {
  Scope scope(
      *this,
      {.verb = Verb::kReduceScatter, .op = op, .dtype = dtype, .numel = numel});
  const int64_t width = bytes_of(dtype);
  const int64_t step = kStageBytes / width / size_;
  std::vector<const void*> pieces(size_);
  for (int64_t done = 0; done == 0 || done < numel; done += step) {
    const int64_t count = std::min(step, numel - done);
    for (int64_t r = 0; r < size_; ++r) {
      copy(own_stage() + r * step * width,
           static_cast<const char*>(input) + (r * numel + done) * width,
           count * width);
    }
    meet();
    for (int64_t r = 0; r < size_; ++r) {
      pieces[r] = stage_of(r) + rank_ * step * width;
    }
    reduce(pieces, static_cast<char*>(output) + done * width, count, dtype, op);
    half_ ^= 1;
  }
}

void Collectives::broadcast(void* data, int64_t numel, at::ScalarType dtype,
                            int64_t root) {
  Scope scope(
      *this,
      {.verb = Verb::kBroadcast, .dtype = dtype, .root = root, .numel = numel});
  const int64_t bytes = numel * bytes_of(dtype);
  for (int64_t done = 0; done == 0 || done < bytes; done += kStageBytes) {
    const int64_t count = std::min(kStageBytes, bytes - done);
    char* part = static_cast<char*>(data) + done;
    if (rank_ == root) copy(own_stage(), part, count);
    meet();
    if (rank_ != root) copy(part, stage_of(root), count);
    half_ ^= 1;
  }
}

void Collectives::all_to_all(std::span<const int64_t> out_bytes, void* output,
                             std::span<const int64_t> in_bytes,
                             const void* input, at::ScalarType dtype) {
  Scope scope(*this, {.verb = Verb::kAllToAll, .dtype = dtype});
  exchange_splits(out_bytes, in_bytes);
  // What each rank sends, and where this rank's part of that begins.
  std::vector<int64_t> total(size_, 0), mine(size_, 0), to(size_, 0);
  for (int64_t r = 0; r < size_; ++r) {
    for (int64_t q = 0; q < size_; ++q) {
      if (q == rank_) mine[r] = total[r];
      total[r] += split(r, q);
    }
    if (r > 0) to[r] = to[r - 1] + out_bytes[r - 1];
  }
  const int64_t longest = *std::max_element(total.begin(), total.end());
  for (int64_t done = 0; done < longest; done += kStageBytes) {
    const int64_t count = std::min(kStageBytes, total[rank_] - done);
    copy(own_stage(), static_cast<const char*>(input) + done, count);
    meet();
    for (int64_t k = 0; k < size_; ++k) {
      const int64_t p = peer(k);
      const int64_t first = std::max(done, mine[p]);
      const int64_t last = std::min(done + kStageBytes, mine[p] + out_bytes[p]);
      if (last <= first) continue;
      copy(static_cast<char*>(output) + to[p] + (first - mine[p]),
           stage_of(p) + (first - done), last - first);
    }
    half_ ^= 1;
  }
}

// All ranks see the whole matrix, so that all fail alike where it disagrees.
void Collectives::exchange_splits(std::span<const int64_t> out_bytes,
                                  std::span<const int64_t> in_bytes) {
  splits_parity_ ^= 1;
  std::atomic<int64_t>* own = segment_.splits(rank_, splits_parity_);
  for (int64_t r = 0; r < size_; ++r) {
    own[r].store(in_bytes[r], std::memory_order_relaxed);
    own[size_ + r].store(out_bytes[r], std::memory_order_relaxed);
  }
  meet();
  const auto& ranks = segment_.place().ranks;
  for (int64_t from = 0; from < size_; ++from) {
    for (int64_t to = 0; to < size_; ++to) {
      const int64_t sent = split(from, to);
      const int64_t expected = split(to, size_ + from);
      if (sent == expected) continue;
      TS_CHECK(false, "ranks disagree: rank ", ranks[from], " sends ", sent,
               " bytes to rank ", ranks[to], ", which expects ", expected);
    }
  }
}

int64_t Collectives::split(int64_t rank, int64_t index) const {
  return segment_.splits(rank, splits_parity_)[index].load(
      std::memory_order_relaxed);
}

void Collectives::barrier() {
  Scope scope(*this, {.verb = Verb::kBarrier});
  meet();
}

char* Collectives::own_stage() const { return segment_.stage(rank_, half_); }

char* Collectives::stage_of(int64_t rank) const {
  return segment_.stage(rank, half_);
}

void Collectives::meet() {
  ++meeting_;
  Lane& lane = segment_.own_lane();
  lane.calls[meeting_ % 2].store(call_);
  post(lane.arrival, meeting_);
  arrived_ = std::chrono::steady_clock::now();
  for (int64_t k = 1; k < size_; ++k) wait_for(peer(k));
}

bool Collectives::has_arrived(int64_t peer) const {
  const uint32_t at = segment_.lane(peer).arrival.value.load();
  return static_cast<int32_t>(at - meeting_) >= 0;
}

void Collectives::wait_for(int64_t peer) {
  const auto ready = [&] { return has_arrived(peer); };
  if (!ready()) {
    wait_until(segment_.lane(peer).arrival, spins_, ready,
               [&] { check_peers(); });
  }
  compare_call(peer);
}

void Collectives::check_no_failure() const {
  if (const auto failure = segment_.failure()) {
    C10_THROW_ERROR(DistBackendError, *failure);
  }
}

// Called while a peer is waited for: throws when waiting is of no use.
void Collectives::check_peers() {
  check_no_failure();
  for (int64_t k = 1; k < size_; ++k) {
    // A peer may arrive and leave: look at its arrival after its end.
    const auto loss = segment_.loss_of(peer(k));
    if (loss && !has_arrived(peer(k))) {
      C10_THROW_ERROR(DistBackendError, *loss);
    }
  }
  const auto waited = std::chrono::steady_clock::now() - arrived_;
  if (waited > segment_.place().timeout) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("timed out. Not arrived: ", missing_peers()));
  }
}

void Collectives::compare_call(int64_t peer) const {
  const Call theirs = segment_.lane(peer).calls[meeting_ % 2].load();
  if (theirs == call_) return;
  const auto& ranks = segment_.place().ranks;
  TS_CHECK(false, "ranks disagree: rank ", ranks[rank_], " calls ",
           call_.describe(), ", but rank ", ranks[peer], " calls ",
           theirs.describe());
}

std::string Collectives::missing_peers() const {
  std::string text;
  for (int64_t r = 0; r < size_; ++r) {
    if (r == rank_ || has_arrived(r)) continue;
    text +=
        c10::str(text.empty() ? "" : "; ", "rank ", segment_.place().ranks[r],
                 " (", segment_.last_call_of(r), ")");
  }
  return text;
}

}  // namespace tessera::comm::shm
