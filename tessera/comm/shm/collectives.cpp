#include "tessera/comm/shm/collectives.h"

#include <algorithm>
#include <array>

#include "tessera/core/processor.h"

namespace tessera::comm::shm {
namespace {

// In place takes one more meeting, which ranks that share cores pay for by
// switching: below, they had rather copy twice.
constexpr int64_t kInPlaceSharedCores = 128 << 10;
constexpr int64_t kLine = 64;
// Far cores gain by stores past the caches from here on.
constexpr int64_t kStreamBytes = 1 << 10;

int64_t width_of(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

// Where slice `r` of `count` elements begins: at a line, if the data does.
int64_t slice_begin(int64_t count, int64_t r, int64_t ranks, int64_t width) {
  if (r == ranks) return count;
  return count * r / ranks / (kLine / width) * (kLine / width);
}

}  // namespace

Collectives::Collectives(Segment& segment)
    : segment_(segment),
      rank_(segment.place().rank),
      size_(segment.place().size()),
      meeting_(segment),
      memory_(segment),
      shares_(static_cast<size_t>(size_)) {}

void Collectives::all_reduce(void* data, int64_t numel, at::ScalarType dtype,
                             ReduceOp op) {
  const Meeting::Scope scope(
      meeting_,
      {.verb = Verb::kAllReduce, .op = op, .dtype = dtype, .numel = numel});
  char* bytes = static_cast<char*>(data);
  if (numel * width_of(dtype) <= kSmallBytes) {
    all_reduce_small(bytes, numel, dtype, op);
  } else {
    all_reduce_staged(bytes, numel, dtype, op);
  }
}

void Collectives::all_reduce_small(char* data, int64_t numel,
                                   at::ScalarType dtype, ReduceOp op) {
  const int64_t bytes = numel * width_of(dtype);
  copy_bytes(own_stage(), data, bytes, stores_for(bytes));
  meet_and_look(bytes);
  std::vector<const void*> inputs(static_cast<size_t>(size_));
  for (int64_t r = 0; r < size_; ++r) {
    inputs[r] = r == rank_ ? data : stage_of(r);
  }
  reduce(inputs, data, numel, dtype, op);
  half_ ^= 1;
}

// Each rank reduces its slice of all tensors, and writes it into all of them.
void Collectives::all_reduce_in_place(char* data, int64_t numel,
                                      at::ScalarType dtype, ReduceOp op) {
  const int64_t width = width_of(dtype);
  const int64_t first = slice_begin(numel, rank_, size_, width);
  const int64_t count = slice_begin(numel, rank_ + 1, size_, width) - first;
  std::vector<void*> slices(static_cast<size_t>(size_));
  for (int64_t r = 0; r < size_; ++r) {
    slices[r] = (r == rank_ ? data : address_of(r)) + first * width;
  }
  const std::vector<const void*> inputs(slices.begin(), slices.end());
  reduce(inputs, slices, count, dtype, op, stores_for(numel * width));
  meeting_.meet();
}

void Collectives::all_reduce_staged(char* data, int64_t numel,
                                    at::ScalarType dtype, ReduceOp op) {
  const int64_t width = width_of(dtype);
  const int64_t bytes = numel * width;
  const int64_t step = kStageBytes / width;
  std::vector<const void*> inputs(static_cast<size_t>(size_));
  const auto round_of = [&](int64_t done) {
    return std::min(step, numel - done);
  };
  // Slice r of a round, in bytes of the round.
  const auto begin = [&](int64_t round, int64_t r) {
    return slice_begin(round, r, size_, width) * width;
  };
  const auto stage = [&](int64_t done) {
    const int64_t round = round_of(done);
    for (int64_t k = 1; k < size_; ++k) {
      const int64_t at = begin(round, peer(k));
      copy_bytes(own_stage() + at, data + done * width + at,
                 begin(round, peer(k) + 1) - at, stores_for(bytes));
    }
  };
  if (meet_in_place(data, bytes, Use::kReduce, [&] { stage(0); })) {
    return all_reduce_in_place(data, numel, dtype, op);
  }
  for (int64_t done = 0; done < numel; done += step) {
    if (done > 0) {
      stage(done);
      meet_and_look(bytes);
    }
    const int64_t round = round_of(done);
    char* part = data + done * width;
    const int64_t own = begin(round, rank_);
    for (int64_t r = 0; r < size_; ++r) {
      inputs[r] = (r == rank_ ? part : stage_of(r)) + own;
    }
    const std::array<void*, 2> outputs{part + own, own_stage() + own};
    reduce(inputs, outputs, (begin(round, rank_ + 1) - own) / width, dtype, op,
           stores_for(bytes));
    meeting_.meet();
    for (int64_t k = 1; k < size_; ++k) {
      const int64_t at = begin(round, peer(k));
      copy_bytes(part + at, stage_of(peer(k)) + at,
                 begin(round, peer(k) + 1) - at);
    }
    half_ ^= 1;
  }
}

void Collectives::all_gather(void* output, const void* input, int64_t numel,
                             at::ScalarType dtype) {
  const Meeting::Scope scope(
      meeting_, {.verb = Verb::kAllGather, .dtype = dtype, .numel = numel});
  const int64_t bytes = numel * width_of(dtype);
  char* to = static_cast<char*>(output);
  const char* from = static_cast<const char*>(input);
  const auto stage = [&](int64_t done) {
    copy_bytes(own_stage(), from + done, std::min(kStageBytes, bytes - done),
               stores_for(bytes));
  };
  const auto keep_own = [&] {
    if (to + rank_ * bytes != from) copy_bytes(to + rank_ * bytes, from, bytes);
  };
  if (meet_in_place(input, bytes, Use::kMove, [&] { stage(0); })) {
    for (int64_t k = 1; k < size_; ++k) {
      memory_.copy_from(peer(k), shares_[peer(k)], to + peer(k) * bytes, 0,
                        bytes);
    }
    keep_own();
    return meeting_.meet();
  }
  for (int64_t done = 0; done == 0 || done < bytes; done += kStageBytes) {
    if (done > 0) {
      stage(done);
      meet_and_look(bytes);
    }
    for (int64_t k = 1; k < size_; ++k) {
      copy_bytes(to + peer(k) * bytes + done, stage_of(peer(k)),
                 std::min(kStageBytes, bytes - done));
    }
    half_ ^= 1;
  }
  keep_own();
}

void Collectives::reduce_scatter(void* output, const void* input, int64_t numel,
                                 at::ScalarType dtype, ReduceOp op) {
  const Meeting::Scope scope(
      meeting_,
      {.verb = Verb::kReduceScatter, .op = op, .dtype = dtype, .numel = numel});
  const int64_t width = width_of(dtype);
  const int64_t bytes = numel * width;
  const int64_t step = kStageBytes / size_ / kLine * kLine;
  const char* from = static_cast<const char*>(input);
  const auto stage = [&](int64_t done) {
    for (int64_t k = 1; k < size_; ++k) {
      copy_bytes(own_stage() + peer(k) * step, from + peer(k) * bytes + done,
                 std::min(step, bytes - done), stores_for(bytes * size_));
    }
  };
  std::vector<const void*> inputs(static_cast<size_t>(size_));
  if (meet_in_place(input, bytes * size_, Use::kReduce, [&] { stage(0); })) {
    for (int64_t r = 0; r < size_; ++r) {
      inputs[r] = (r == rank_ ? from : address_of(r)) + rank_ * bytes;
    }
    reduce(inputs, output, numel, dtype, op);
    return meeting_.meet();
  }
  for (int64_t done = 0; done == 0 || done < bytes; done += step) {
    if (done > 0) {
      stage(done);
      meet_and_look(bytes);
    }
    for (int64_t r = 0; r < size_; ++r) {
      inputs[r] =
          r == rank_ ? from + r * bytes + done : stage_of(r) + rank_ * step;
    }
    reduce(inputs, static_cast<char*>(output) + done,
           std::min(step, bytes - done) / width, dtype, op);
    half_ ^= 1;
  }
}

void Collectives::broadcast(void* data, int64_t numel, at::ScalarType dtype,
                            int64_t root) {
  const Meeting::Scope scope(
      meeting_,
      {.verb = Verb::kBroadcast, .dtype = dtype, .root = root, .numel = numel});
  const int64_t bytes = numel * width_of(dtype);
  char* own = static_cast<char*>(data);
  const auto stage = [&](int64_t done) {
    if (rank_ != root) return;
    copy_bytes(own_stage(), own + done, std::min(kStageBytes, bytes - done),
               stores_for(bytes));
  };
  const Use use = rank_ == root ? Use::kMove : Use::kNone;
  if (meet_in_place(data, bytes, use, [&] { stage(0); })) {
    if (rank_ != root) memory_.copy_from(root, shares_[root], own, 0, bytes);
    return meeting_.meet();
  }
  for (int64_t done = 0; done == 0 || done < bytes; done += kStageBytes) {
    if (done > 0) {
      stage(done);
      meet_and_look(bytes);
    }
    if (rank_ != root) {
      copy_bytes(own + done, stage_of(root),
                 std::min(kStageBytes, bytes - done));
    }
    half_ ^= 1;
  }
}

void Collectives::barrier() {
  const Meeting::Scope scope(meeting_, {.verb = Verb::kBarrier});
  meeting_.meet();
}

bool Collectives::meet_in_place(const void* data, int64_t bytes, Use use,
                                const std::function<void()>& stage_first) {
  if (bytes <= kSmallBytes) {
    stage_first();
    meet_and_look(bytes);
    return false;
  }
  const Share own = share_of(data, bytes, use);
  publish(own, bytes);
  const bool stages = own.kind == Share::Kind::kNowhere;
  if (stages) stage_first();
  meet_and_look(bytes);
  bool any_staged = false, any_in_place = false;
  for (int64_t r = 0; r < size_; ++r) {
    read_share(r, bytes);
    any_staged |= is_staged(r);
    any_in_place |= !is_staged(r) && shares_[r].kind != Share::Kind::kUnread;
  }
  if (!any_staged) return true;
  if (!any_in_place) return false;
  // Some can be reached and some cannot: those who counted on it stage too.
  if (!stages) stage_first();
  meeting_.meet();
  return false;
}

void Collectives::meet_and_look(int64_t bytes) {
  if (bytes <= kStreamBytes) return meeting_.meet();
  meeting_.meet_and_look(/*always=*/bytes > kSmallBytes);
}

void Collectives::publish(const Share& own, int64_t bytes) {
  shares_parity_ ^= 1;
  if (bytes > kSmallBytes) segment_.own_lane().shares[shares_parity_] = own;
}

void Collectives::read_share(int64_t rank, int64_t bytes) {
  shares_[rank] = bytes > kSmallBytes
                      ? segment_.lane(rank).shares[shares_parity_]
                      : Share{};
}

Share Collectives::share_of(const void* data, int64_t bytes, Use use) const {
  using Kind = Share::Kind;
  if (use == Use::kNone) return {.kind = Kind::kUnread};
  if (bytes <= kSmallBytes) return {};
  if (!segment_.ranks_have_cores() && bytes < kInPlaceSharedCores) return {};
  const Share share = memory_.share_of(data);
  // One copy through the system is cheaper than two when it is large.
  const bool by_system = share.kind == Kind::kForeign;
  const bool pays = use == Use::kMove && bytes > kStageBytes;
  return by_system && !pays ? Share{} : share;
}

Stores Collectives::stores_for(int64_t bytes) const {
  if (bytes > kStreamBytes && meeting_.is_far()) return Stores::kStreaming;
  // 1.01 to 1.38 times there; not measured elsewhere
  // (bench/results/collectives_2core_intel_2026-11-24.md).
  return is_intel() ? Stores::kAskedAhead : Stores::kOrdinary;
}

char* Collectives::own_stage() const { return segment_.stage(rank_, half_); }

char* Collectives::stage_of(int64_t rank) const {
  return segment_.stage(rank, half_);
}

}  // namespace tessera::comm::shm
