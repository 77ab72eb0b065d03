// Groups by algorithms and over several hosts, beside the same on one host.
// Hosts are names here: tests/parity/test_hosts.py has network namespaces.
#include "tessera/comm/algorithms/hierarchical.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/comm/communicator.h"
#include "tests/support/layouts.h"

namespace tessera::comm {
namespace {

using testing::on_hosts;
using testing::on_one_host;

struct Layout {
  std::string name;
  CommunicatorOptions options;
  friend void PrintTo(const Layout& layout, std::ostream* out) {
    *out << layout.name;
  }
};

std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const char* hosts : {"aabb", "abab", "abba", "aab", "abbb", "abc",
                            "aabbcc", "aabbbc", "aaa"}) {
    all.push_back({std::string("hosts_") + hosts, on_hosts(hosts)});
  }
  for (const char* backend : {"gloo", "shm"}) {
    for (const char* algorithm : {"ring", "recursive_doubling", "tree"}) {
      for (int64_t ranks : {2, 3, 4}) {
        all.push_back({c10::str(backend, "_", algorithm, "_", ranks),
                       on_one_host(backend, ranks, algorithm)});
      }
    }
  }
  return all;
}

const std::vector<at::ScalarType> kDtypes = {
    at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kByte};

// Small numbers, whose sums and products are exact in every dtype.
at::Tensor any(std::vector<int64_t> sizes, at::ScalarType dtype,
               uint64_t seed) {
  std::mt19937_64 random(seed);
  at::Tensor t = at::empty(sizes, at::kLong);
  auto* values = t.data_ptr<int64_t>();
  std::generate_n(values, t.numel(), [&] { return 1 + random() % 2; });
  return t.to(dtype);
}

#define EXPECT_SAME(actual, expected, what) \
  EXPECT_TRUE(at::equal(actual, expected))  \
      << what << " of " << (actual).numel() << " " << (actual).scalar_type()

// The same call on the group under test and on one over shared memory.
class Pair {
 public:
  Pair(Group& tested, Group& plain) : tested_(tested), plain_(plain) {}

  void all_reduce(int64_t numel, at::ScalarType dtype, ReduceOp op,
                  uint64_t seed) {
    const at::Tensor t = any({numel}, dtype, seed + tested_.rank());
    const at::Tensor wanted = t.clone();
    tested_.all_reduce(t, op).wait();
    plain_.all_reduce(wanted, op).wait();
    EXPECT_SAME(t, wanted, "all_reduce");
  }

  void all_gather(int64_t numel, at::ScalarType dtype, uint64_t seed) {
    const int64_t size = tested_.size(), rank = tested_.rank();
    at::Tensor out = at::zeros({size, numel}, dtype);
    out[rank].copy_(any({numel}, dtype, seed + rank));
    at::Tensor wanted = at::zeros({size, numel}, dtype);
    plain_.all_gather(wanted, out[rank].clone()).wait();
    // In place, and from elsewhere.
    const bool in_place = seed % 2 == 0;
    tested_.all_gather(out, in_place ? out[rank] : out[rank].clone()).wait();
    EXPECT_SAME(out, wanted, "all_gather");
  }

  void reduce_scatter(int64_t numel, at::ScalarType dtype, ReduceOp op,
                      uint64_t seed) {
    const at::Tensor in =
        any({numel * tested_.size()}, dtype, seed + tested_.rank());
    const at::Tensor before = in.clone();
    at::Tensor out = at::empty({numel}, dtype), wanted = at::empty_like(out);
    tested_.reduce_scatter(out, in, op).wait();
    plain_.reduce_scatter(wanted, in, op).wait();
    EXPECT_SAME(out, wanted, "reduce_scatter");
    EXPECT_SAME(in, before, "the input");
  }

  void broadcast(int64_t numel, at::ScalarType dtype, uint64_t seed) {
    const auto root = static_cast<int64_t>(seed) % tested_.size();
    const at::Tensor t = any({numel}, dtype, seed + tested_.rank());
    tested_.broadcast(t, root).wait();
    EXPECT_SAME(t, any({numel}, dtype, seed + root), "broadcast");
  }

  void all_to_all(int64_t scale, at::ScalarType dtype, uint64_t seed) {
    const auto rows = [&](int64_t from, int64_t to) {
      return (from * 3 + to * 5 + static_cast<int64_t>(seed % 3)) % 4 * scale;
    };
    std::vector<int64_t> in, out;
    int64_t sent = 0, received = 0;
    for (int64_t r = 0; r < tested_.size(); ++r) {
      sent += in.emplace_back(rows(tested_.rank(), r));
      received += out.emplace_back(rows(r, tested_.rank()));
    }
    const at::Tensor input = any({sent, 3}, dtype, seed + tested_.rank());
    at::Tensor output = at::zeros({received, 3}, dtype);
    at::Tensor wanted = at::zeros_like(output);
    tested_.all_to_all(output, input, out, in).wait();
    plain_.all_to_all(wanted, input, out, in).wait();
    EXPECT_SAME(output, wanted, "all_to_all");
  }

  // Each rank to the next, all sends before all receives.
  void messages(int64_t numel, uint64_t seed) {
    const int64_t size = tested_.size(), rank = tested_.rank();
    std::vector<Work> sends;
    for (int64_t peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      sends.push_back(
          tested_.send(any({numel}, at::kFloat, seed + rank), peer, peer));
    }
    for (int64_t peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      at::Tensor got = at::zeros({numel});
      tested_.recv(got, peer, rank).wait();
      EXPECT_SAME(got, any({numel}, at::kFloat, seed + peer), "recv");
    }
    for (Work& send : sends) send.wait();
  }

  void any_call(std::mt19937_64& random) {
    const uint64_t seed = random() >> 8;
    const auto numel = static_cast<int64_t>(
        random() % 8 == 0 ? 30000 + random() % 9 : random() % 40);
    const at::ScalarType dtype = kDtypes[random() % kDtypes.size()];
    ReduceOp op = static_cast<ReduceOp>(random() % 5);
    if (op == ReduceOp::kMean && !at::isFloatingType(dtype)) {
      op = ReduceOp::kSum;
    }
    switch (random() % 7) {
      case 0:
        return all_reduce(numel, dtype, op, seed);
      case 1:
        return all_gather(numel, dtype, seed);
      case 2:
        return reduce_scatter(numel, dtype, op, seed);
      case 3:
        return broadcast(numel, dtype, seed);
      case 4:
        return all_to_all(numel / 4, dtype, seed);
      case 5:
        return messages(numel, seed);
      default:
        return tested_.barrier();
    }
  }

 private:
  Group& tested_;
  Group& plain_;
};

class Layouts : public ::testing::TestWithParam<Layout> {};

TEST_P(Layouts, DoWhatOneHostDoes) {
  const auto beside = c10::make_intrusive<c10d::HashStore>();
  const int64_t world = GetParam().options.world_size;
  run_threads(GetParam().options, [&](Communicator& tested) {
    CommunicatorOptions options = on_one_host("shm", world, "auto");
    options.rank = tested.rank();
    options.store = beside;
    const auto plain = make_communicator(options);
    Pair world_pair(tested.world(), plain->world());
    for (at::ScalarType dtype : kDtypes) {
      for (int64_t numel : {0, 1, 2, 13, 5000}) {
        world_pair.all_reduce(numel, dtype, ReduceOp::kSum, 7);
        world_pair.reduce_scatter(numel, dtype, ReduceOp::kMax, 8);
        world_pair.all_gather(numel, dtype, 9);
      }
    }
    std::mt19937_64 random(29);
    for (int i = 0; i < 60; ++i) world_pair.any_call(random);
    if (world < 3) return;
    const std::vector<int64_t> some = {0, 1, world - 1};
    Group* group = tested.make_group(some, "some");
    Group* same = plain->make_group(some, "some");
    if (group == nullptr) return;
    Pair pair(*group, *same);
    for (int i = 0; i < 40; ++i) pair.any_call(random);
  });
}

// Many in flight, awaited from the last to the first.
TEST_P(Layouts, KeepTheOrderOfCalls) {
  run_threads(GetParam().options, [](Communicator& communicator) {
    Group& world = communicator.world();
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 20; ++i) {
      tensors.push_back(at::full({i * 100}, 1.0));
      works.push_back(i % 3 == 0 ? world.broadcast(tensors.back(), 1)
                                 : world.all_reduce(tensors.back()));
    }
    for (size_t i = works.size(); i-- > 0;) {
      works[i].wait();
      const double wanted = i % 3 == 0 ? 1.0 : double(world.size());
      EXPECT_SAME(tensors[i], at::full_like(tensors[i], wanted), i);
    }
  });
}

// Values that round: equal on all ranks, and in the next run.
TEST_P(Layouts, GiveTheSameBitsTwiceAndEverywhere) {
  const int64_t world = GetParam().options.world_size;
  std::vector<at::Tensor> of_rank(world);
  for (int repeat = 0; repeat < 2; ++repeat) {
    run_threads(GetParam().options, [&](Communicator& communicator) {
      const int64_t rank = communicator.rank();
      const at::Tensor t = at::arange(70001).add(rank * 1.3).sin();
      communicator.world().all_reduce(t, ReduceOp::kMean).wait();
      if (repeat == 1) {
        EXPECT_SAME(t, of_rank[rank], "the second run");
      }
      of_rank[rank] = t;
    });
  }
  for (const at::Tensor& t : of_rank) EXPECT_SAME(t, of_rank[0], "a rank");
}

INSTANTIATE_TEST_SUITE_P(All, Layouts, ::testing::ValuesIn(layouts()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::comm
