// Random sequences of operations on random subgroups give the right values:
// several in flight, on ordinary and registered tensors, awaited in any order.
// The sanitizers run it too (./dev test --sanitize).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

constexpr int64_t kWorld = 4;
constexpr int kSequences = 500;  // in each of the two tests
constexpr int kSequencesPerGroups = 25;
constexpr int kOperations = 12;

// Small integers: every sum and product of four ranks is exact in each dtype.
// Five in a row, again and again.
at::Tensor values(int64_t rank, int64_t seed, int64_t numel,
                  at::ScalarType dtype) {
  constexpr int64_t kPeriod = 5;
  return at::arange(kPeriod)
      .mul(2 * rank + 1)
      .add(seed % 97)
      .remainder(kPeriod)
      .remainder(3)
      .to(dtype)
      .repeat({numel / kPeriod + 1})
      .narrow(0, 0, numel);
}

// What every rank draws alike.
struct Draw {
  std::mt19937_64 engine;
  int64_t below(int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n - 1)(engine);
  }
  at::ScalarType dtype() {
    static const std::vector<at::ScalarType> kDtypes = {
        at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kInt};
    return kDtypes[below(6)];
  }
  // Around the sizes at which the algorithm changes.
  int64_t numel() {
    static const std::vector<int64_t> kSizes = {0,     1,     7,     1000,
                                                20000, 70000, 300000};
    const int64_t size = kSizes[below(7)];
    return size > 1000 ? size + below(100) : size;
  }
};

// One operation that this rank started, and what it must have given.
struct Started {
  Work work;
  std::function<void()> check;
};

class Sequence {
 public:
  Sequence(Communicator& ranks, const std::vector<Group*>& groups,
           uint64_t seed)
      : ranks_(ranks), groups_(groups), draw_{std::mt19937_64(seed)} {}

  void run() {
    for (int i = 0; i < kOperations; ++i) step();
    while (!started_.empty()) finish(0);
  }

 private:
  void step() {
    // Drawn by every rank, members or not, so that all draw the same.
    Group* group = groups_[draw_.below(static_cast<int64_t>(groups_.size()))];
    const int64_t verb = draw_.below(7);
    const int64_t numel = draw_.numel();
    const at::ScalarType dtype = draw_.dtype();
    const int64_t seed = draw_.below(1000);
    const int64_t who_registers = draw_.below(3);  // nobody, all, some
    const bool waits = draw_.below(3) == 0;
    const int64_t next = draw_.below(8);
    if (group == nullptr) return;
    registers_ = who_registers == 1 ||
                 (who_registers == 2 && (seed + group->rank()) % 2 == 0);
    mode_ = waits ? Mode::kBlocking : Mode::kAsync;
    start(*group, verb, numel, dtype, seed);
    if (next < 3 && !started_.empty()) {
      finish(static_cast<size_t>(next) % started_.size());
    }
  }

  void start(Group& group, int64_t verb, int64_t numel, at::ScalarType dtype,
             int64_t seed) {
    switch (verb) {
      case 0:
        return all_reduce(group, numel, dtype, seed);
      case 1:
        return all_gather(group, numel, dtype, seed);
      case 2:
        return reduce_scatter(group, numel, dtype, seed);
      case 3:
        return all_to_all(group, numel % 5000, dtype, seed);
      case 4:
        return broadcast(group, numel, dtype, seed);
      case 5:
        return messages(group, numel, dtype, seed);
      default:
        return group.barrier();
    }
  }

  void finish(size_t index) {
    Started one = std::move(started_[index]);
    started_.erase(started_.begin() + static_cast<std::ptrdiff_t>(index));
    one.work.wait();
    one.check();
  }

  at::Tensor tensor(const at::Tensor& from) {
    if (!registers_) return from.clone();
    at::Tensor copy = ranks_.empty(from.sizes(), from.scalar_type());
    copy.copy_(from);
    return copy;
  }

  at::Tensor own(Group& group, int64_t seed, int64_t numel,
                 at::ScalarType dtype) {
    return tensor(values(group.ranks()[group.rank()], seed, numel, dtype));
  }

  void expect(Work work, at::Tensor actual, at::Tensor expected,
              const char* what) {
    started_.push_back({std::move(work), [actual, expected, what] {
                          EXPECT_TRUE(at::equal(actual, expected))
                              << what << ' ' << actual.scalar_type() << ' '
                              << actual.sizes();
                        }});
  }

  static at::Tensor sum_of(Group& group, int64_t seed, int64_t numel,
                           at::ScalarType dtype) {
    at::Tensor sum = at::zeros({numel}, at::kDouble);
    for (const int64_t rank : group.ranks()) {
      sum += values(rank, seed, numel, dtype);
    }
    return sum.to(dtype);
  }

  void all_reduce(Group& group, int64_t numel, at::ScalarType dtype,
                  int64_t seed) {
    const at::Tensor t = own(group, seed, numel, dtype);
    expect(group.all_reduce(t, ReduceOp::kSum, mode_), t,
           sum_of(group, seed, numel, dtype), "all_reduce");
  }

  void all_gather(Group& group, int64_t numel, at::ScalarType dtype,
                  int64_t seed) {
    at::Tensor out = tensor(at::empty({group.size() * numel}, dtype));
    std::vector<at::Tensor> pieces;
    for (const int64_t rank : group.ranks()) {
      pieces.push_back(values(rank, seed, numel, dtype));
    }
    expect(group.all_gather(out, own(group, seed, numel, dtype), mode_), out,
           at::cat(pieces), "all_gather");
  }

  void reduce_scatter(Group& group, int64_t numel, at::ScalarType dtype,
                      int64_t seed) {
    at::Tensor out = tensor(at::empty({numel}, dtype));
    const at::Tensor in = own(group, seed, numel * group.size(), dtype);
    expect(group.reduce_scatter(out, in, ReduceOp::kSum, mode_), out,
           sum_of(group, seed, numel * group.size(), dtype)
               .narrow(0, group.rank() * numel, numel),
           "reduce_scatter");
  }

  // Rank r of the group sends (3 r + 5 q + seed) % 4 x numel to rank q.
  void all_to_all(Group& group, int64_t numel, at::ScalarType dtype,
                  int64_t seed) {
    const auto rows = [&](int64_t from, int64_t to) {
      return (3 * from + 5 * to + seed) % 4 * numel;
    };
    std::vector<int64_t> in_splits, out_splits;
    std::vector<at::Tensor> in, expected;
    for (int64_t q = 0; q < group.size(); ++q) {
      in_splits.push_back(rows(group.rank(), q));
      out_splits.push_back(rows(q, group.rank()));
      in.push_back(values(group.rank(), q, in_splits.back(), dtype));
      expected.push_back(values(q, group.rank(), out_splits.back(), dtype));
    }
    const at::Tensor want = at::cat(expected);
    at::Tensor out = tensor(at::empty_like(want));
    expect(group.all_to_all(out, tensor(at::cat(in)), out_splits, in_splits,
                            mode_),
           out, want, "all_to_all");
  }

  void broadcast(Group& group, int64_t numel, at::ScalarType dtype,
                 int64_t seed) {
    const int64_t root = seed % group.size();
    const at::Tensor t = own(group, seed, numel, dtype);
    expect(group.broadcast(t, root, mode_), t,
           values(group.ranks()[root], seed, numel, dtype), "broadcast");
  }

  // To the next rank and from the one before; large ones cross.
  void messages(Group& group, int64_t numel, at::ScalarType dtype,
                int64_t seed) {
    const int64_t size = group.size();
    if (size == 1) return;
    const int64_t to = (group.rank() + 1) % size;
    const int64_t from = (group.rank() + size - 1) % size;
    const at::Tensor out = own(group, seed, numel, dtype);
    at::Tensor in = tensor(at::empty({numel}, dtype));
    expect(group.send(out, to, seed), out, out, "send");
    expect(group.recv(in, from, seed), in,
           values(group.ranks()[from], seed, numel, dtype), "recv");
  }

  Communicator& ranks_;
  const std::vector<Group*>& groups_;
  Draw draw_;
  bool registers_ = false;
  Mode mode_ = Mode::kAsync;
  std::vector<Started> started_;
};

void run_sequences(Communicator& ranks) {
  std::mt19937_64 engine(7);
  for (int s = 0; s < kSequences; s += kSequencesPerGroups) {
    // Three groups of any of the ranks, and all of them.
    std::vector<Group*> groups = {&ranks.world()};
    for (int g = 0; g < 3; ++g) {
      const uint64_t members = 1 + engine() % ((1U << kWorld) - 1);
      std::vector<int64_t> chosen;
      for (int64_t r = 0; r < kWorld; ++r) {
        if (members >> r & 1) chosen.push_back(r);
      }
      groups.push_back(ranks.make_group(chosen, c10::str("g", s, "-", g)));
    }
    for (int i = 0; i < kSequencesPerGroups; ++i) {
      Sequence(ranks, groups, static_cast<uint64_t>(s + i)).run();
    }
  }
}

TEST(Sequences, OfThreadsGiveTheRightValues) {
  run_threads(kWorld, "shm", run_sequences, std::chrono::minutes(5));
}

TEST(Sequences, OfProcessesGiveTheRightValues) {
  testing::run_processes(kWorld, "shm", run_sequences, std::chrono::minutes(5));
}

}  // namespace
}  // namespace tessera::comm
