// Every algorithm beside the others, beside sums in double precision, and its
// cost as counted beside its formula.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <thread>

#include "tessera/comm/algorithms/blocking_calls.h"
#include "tessera/comm/algorithms/collectives.h"
#include "tessera/comm/algorithms/hierarchical_collectives.h"
#include "tessera/comm/algorithms/ring.h"
#include "tessera/comm/base/partial_sums.h"
#include "tessera/core/error.h"
#include "tests/support/failure_of.h"
#include "tests/support/memory_transport.h"

namespace tessera::comm::algorithms {
namespace {

using ::tessera::comm::name_of;
using testing::MemoryNetwork;

constexpr int64_t kMostRanks = 9;
const std::vector<Algorithm> kAlgorithms = {
    Algorithm::kRing, Algorithm::kRecursiveDoubling, Algorithm::kTree};
const std::vector<int64_t> kSizes = {0, 1, 2, 3, 7, 8, 9, 64, 65, 1000, 5041};
const std::vector<at::ScalarType> kDtypes = {
    at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
    at::kInt,    at::kShort, at::kChar, at::kByte};
const std::vector<ReduceOp> kOps = {ReduceOp::kSum, ReduceOp::kMean,
                                    ReduceOp::kMin, ReduceOp::kMax,
                                    ReduceOp::kProduct};

using Body = std::function<void(Transport&)>;

void run(MemoryNetwork& network, int64_t ranks, const Body& body) {
  std::vector<std::jthread> threads;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { body(network.end_of(rank)); });
  }
}

void run(int64_t ranks, const Body& body) {
  MemoryNetwork network(ranks, {});
  run(network, ranks, body);
}

// Values whose sums and products are exact in every dtype, or any values.
at::Tensor exact_input(int64_t rank, int64_t numel, at::ScalarType dtype) {
  return at::arange(numel)
      .mul(rank * 2 + 1)
      .remainder(7)
      .remainder(2)
      .add(1)
      .to(dtype);
}

at::Tensor rough_input(int64_t rank, int64_t numel, at::ScalarType dtype) {
  return at::arange(numel, at::kDouble).add(1).mul(rank + 1.7).sin().to(dtype);
}

using Input = std::function<at::Tensor(int64_t, int64_t, at::ScalarType)>;

at::Tensor reduced(const Input& input, int64_t ranks, int64_t numel,
                   at::ScalarType dtype, ReduceOp op) {
  at::Tensor all = at::empty({ranks, numel}, at::kDouble);
  for (int64_t r = 0; r < ranks; ++r) all[r].copy_(input(r, numel, dtype));
  if (op == ReduceOp::kSum) return all.sum(0);
  if (op == ReduceOp::kMean) return all.mean(0);
  if (op == ReduceOp::kProduct) return all.prod(0);
  if (numel == 0) return at::empty({0}, at::kDouble);
  return op == ReduceOp::kMin ? all.amin(0) : all.amax(0);
}

// `tensor` becomes the reduction over all ranks, as a group does it.
void all_reduce_tensor(Transport& transport, Algorithm algorithm,
                       const at::Tensor& tensor, ReduceOp op) {
  const Elements result = elements_of(tensor);
  const Partial partial(result);
  all_reduce(transport, algorithm, partial.elements(), result,
             {op, transport.size()});
}

at::Tensor reduce_scatter_tensor(Transport& transport, Algorithm algorithm,
                                 const at::Tensor& input, ReduceOp op) {
  const Elements values = elements_of(input);
  const Scratch partial(values.numel, partial_dtype(values.dtype));
  begin_partial(values, partial.elements());
  const Bounds bounds = even_bounds(values.numel, transport.size());
  const int64_t rank = transport.rank();
  at::Tensor output =
      at::empty({bounds[rank + 1] - bounds[rank]}, input.scalar_type());
  reduce_scatter(transport, algorithm, partial.elements(), bounds,
                 elements_of(output), {op, transport.size()});
  return output;
}

// Calls `check` for every algorithm that does `verb`, on 1 to 9 ranks.
void on_all(Verb verb,
            const std::function<void(Transport&, Algorithm)>& check) {
  for (Algorithm algorithm : kAlgorithms) {
    if (!implements(algorithm, verb)) continue;
    for (int64_t ranks = 1; ranks <= kMostRanks; ++ranks) {
      SCOPED_TRACE(c10::str(name_of(algorithm), " on ", ranks, " ranks"));
      run(ranks, [&](Transport& end) { check(end, algorithm); });
    }
  }
}

#define EXPECT_SAME(actual, expected)                                      \
  EXPECT_TRUE(at::equal(actual, expected))                                 \
      << "rank " << end.rank() << " of " << end.size() << ", "             \
      << name_of(algorithm) << ", " << (actual).numel() << " elements of " \
      << (actual).scalar_type()

// A message that is under way may still move it.
TEST(ScratchTensor, StaysWhereAnExceptionEndsItsScope) {
  for (const bool fails : {false, true}) {
    std::weak_ptr<int> seen;
    testing::failure_of([&] {
      const auto memory = std::make_shared<int>(1);
      seen = memory;
      const ScratchTensor scratch(
          at::from_blob(memory.get(), {1}, [memory](void*) {}, at::kInt));
      EXPECT_EQ(scratch.elements().nbytes(), 4);
      TS_CHECK(!fails, "a peer has gone");
    });
    EXPECT_EQ(seen.expired(), !fails);
  }
}

TEST(Algorithms, ReduceEveryDtypeExactly) {
  on_all(Verb::kAllReduce, [](Transport& end, Algorithm algorithm) {
    for (at::ScalarType dtype : kDtypes) {
      for (ReduceOp op : kOps) {
        if (op == ReduceOp::kMean && !at::isFloatingType(dtype)) continue;
        const at::Tensor t = exact_input(end.rank(), 37, dtype);
        all_reduce_tensor(end, algorithm, t, op);
        EXPECT_SAME(t,
                    reduced(exact_input, end.size(), 37, dtype, op).to(dtype));
      }
    }
    const at::Tensor any = at::zeros({end.size()}, at::kBool);
    any[end.rank()].fill_(true);
    all_reduce_tensor(end, algorithm, any, ReduceOp::kMax);
    EXPECT_SAME(any, at::ones_like(any));
  });
}

TEST(Algorithms, ReduceEverySize) {
  on_all(Verb::kAllReduce, [](Transport& end, Algorithm algorithm) {
    for (int64_t numel : kSizes) {
      const at::Tensor t = exact_input(end.rank(), numel, at::kFloat);
      all_reduce_tensor(end, algorithm, t, ReduceOp::kSum);
      EXPECT_SAME(
          t, reduced(exact_input, end.size(), numel, at::kFloat, ReduceOp::kSum)
                 .to(at::kFloat));
    }
  });
  on_all(Verb::kReduceScatter, [](Transport& end, Algorithm algorithm) {
    for (int64_t numel : kSizes) {
      const at::Tensor whole =
          reduced(exact_input, end.size(), numel, at::kFloat, ReduceOp::kMean)
              .to(at::kFloat);
      const Bounds bounds = even_bounds(numel, end.size());
      const int64_t begin = bounds[end.rank()];
      const at::Tensor piece = reduce_scatter_tensor(
          end, algorithm, exact_input(end.rank(), numel, at::kFloat),
          ReduceOp::kMean);
      EXPECT_SAME(piece, whole.narrow(0, begin, piece.numel()));
    }
  });
}

// Sums of any values: near those in double precision, and the same bits on
// every rank, in every run.
TEST(Algorithms, RoundAsTheySay) {
  for (const auto& [dtype, bound] :
       std::vector<std::pair<at::ScalarType, double>>{
           {at::kDouble, 1e-14}, {at::kFloat, 1e-6}, {at::kBFloat16, 4e-3}}) {
    for (Algorithm algorithm : kAlgorithms) {
      for (int64_t ranks = 2; ranks <= kMostRanks; ++ranks) {
        std::vector<at::Tensor> of_rank(ranks);
        const at::Tensor exact =
            reduced(rough_input, ranks, 501, dtype, ReduceOp::kMean);
        for (int repeat = 0; repeat < 2; ++repeat) {
          run(ranks, [&](Transport& end) {
            const at::Tensor t = rough_input(end.rank(), 501, dtype);
            all_reduce_tensor(end, algorithm, t, ReduceOp::kMean);
            at::Tensor& kept = of_rank[end.rank()];
            if (kept.defined()) {
              EXPECT_SAME(t, kept);
            }
            kept = t;
          });
        }
        const double off =
            of_rank[0].to(at::kDouble).sub(exact).abs().max().item<double>();
        EXPECT_LE(off, bound * exact.abs().max().item<double>());
        for (const at::Tensor& t : of_rank)
          EXPECT_TRUE(at::equal(t, of_rank[0]));
      }
    }
  }
}

// Partial sums of bf16 are kept in fp32. Rounded at every step, 0.75 would be
// lost beside 256, whose neighbour is 258.
TEST(Algorithms, RoundHalfPrecisionOnce) {
  on_all(Verb::kAllReduce, [](Transport& end, Algorithm algorithm) {
    const at::Tensor t =
        at::full({3}, end.rank() == 0 ? 256.0 : 0.75, at::kBFloat16);
    all_reduce_tensor(end, algorithm, t, ReduceOp::kSum);
    const double sum = 256 + 0.75 * static_cast<double>(end.size() - 1);
    EXPECT_SAME(t, at::full({3}, sum, at::kFloat).to(at::kBFloat16));
  });
}

TEST(Algorithms, GatherPiecesOfAnySize) {
  on_all(Verb::kAllGather, [](Transport& end, Algorithm algorithm) {
    for (int64_t numel : kSizes) {
      const at::Tensor wanted = rough_input(0, numel, at::kFloat);
      for (bool even : {true, false}) {
        Bounds bounds = even_bounds(numel, end.size());
        if (!even && end.size() > 1) bounds[1] = bounds[0];
        const int64_t begin = bounds[end.rank()];
        const int64_t count = bounds[end.rank() + 1] - begin;
        const at::Tensor t = at::zeros({numel});
        t.narrow(0, begin, count).copy_(wanted.narrow(0, begin, count));
        all_gather(end, algorithm, elements_of(t), bounds);
        EXPECT_SAME(t, wanted);
      }
    }
  });
}

TEST(Algorithms, BroadcastFromEveryRoot) {
  on_all(Verb::kBroadcast, [](Transport& end, Algorithm algorithm) {
    for (int64_t root = 0; root < end.size(); ++root) {
      for (int64_t numel : kSizes) {
        const at::Tensor t = exact_input(end.rank(), numel, at::kShort);
        broadcast(end, algorithm, elements_of(t).bytes(), root);
        EXPECT_SAME(t, exact_input(root, numel, at::kShort));
      }
    }
  });
}

TEST(Algorithms, WorkOnSomeOfTheRanks) {
  run(7, [](Transport& whole) {
    if (whole.rank() % 2 == 0) return;
    Subset end(whole, {5, 1, 3});
    for (Algorithm algorithm : kAlgorithms) {
      const at::Tensor t = at::full({10}, double(whole.rank()));
      all_reduce_tensor(end, algorithm, t, ReduceOp::kSum);
      EXPECT_SAME(t, at::full({10}, 9.0));
    }
  });
}

// What an algorithm does on n bytes of fp32.
void perform(Transport& end, Verb verb, Algorithm algorithm, int64_t bytes) {
  const int64_t numel = bytes / 4;
  const at::Tensor t = exact_input(end.rank(), numel, at::kFloat);
  if (verb == Verb::kAllReduce) {
    all_reduce_tensor(end, algorithm, t, ReduceOp::kSum);
  } else if (verb == Verb::kReduceScatter) {
    reduce_scatter_tensor(end, algorithm, t, ReduceOp::kSum);
  } else if (verb == Verb::kAllGather) {
    all_gather(end, algorithm, elements_of(t), even_bounds(numel, end.size()));
  } else {
    broadcast(end, algorithm, elements_of(t).bytes(), /*root=*/0);
  }
}

double counted(Verb verb, Algorithm algorithm, int64_t ranks, int64_t bytes,
               Link link) {
  MemoryNetwork network(ranks, link);
  run(network, ranks,
      [&](Transport& end) { perform(end, verb, algorithm, bytes); });
  return network.seconds();
}

TEST(Algorithms, CostWhatTheirFormulasSay) {
  const Link mixed{.alpha = 3.0, .beta = 0.25, .gamma = 0.125};
  for (Verb verb : {Verb::kAllReduce, Verb::kAllGather, Verb::kReduceScatter,
                    Verb::kBroadcast}) {
    for (Algorithm algorithm : kAlgorithms) {
      if (!implements(algorithm, verb)) continue;
      for (int64_t ranks = 1; ranks <= kMostRanks; ++ranks) {
        SCOPED_TRACE(c10::str(name_of(verb), " by ", name_of(algorithm), " on ",
                              ranks, " ranks"));
        // A number of elements that every number of ranks divides.
        const int64_t bytes = 4 * 2520;
        const Cost cost = cost_of(verb, algorithm, ranks, bytes);
        const auto count = [&](Link link) {
          return counted(verb, algorithm, ranks, bytes, link);
        };
        EXPECT_EQ(count({.alpha = 1}), cost.steps);
        EXPECT_EQ(count({.beta = 1}), cost.bytes);
        EXPECT_EQ(count({.gamma = 1}), cost.reduced);
        // Where ranks do not go in step, one may receive while it reduces.
        const bool overlaps =
            algorithm != Algorithm::kRing && (ranks & (ranks - 1)) != 0;
        const double seconds = cost.seconds(mixed);
        EXPECT_LE(count(mixed), seconds);
        EXPECT_TRUE(overlaps || count(mixed) == seconds) << count(mixed);
        // Pieces that are not even cost no more than the longest.
        EXPECT_LE(counted(verb, algorithm, ranks, 4 * 2503, mixed),
                  cost_of(verb, algorithm, ranks, 4 * 2520).seconds(mixed));
      }
    }
  }
}

// A ring sends what no algorithm can do without: 2 (p - 1)/p n from each rank.
TEST(Algorithms, RingSendsTheFewestBytesAndDoublingTheFewestMessages) {
  const int64_t ranks = 8, bytes = 4 * 840;
  for (const auto& [algorithm, messages, sent] :
       std::vector<std::tuple<Algorithm, int64_t, int64_t>>{
           {Algorithm::kRing, 14, 2 * 7 * bytes / 8},
           {Algorithm::kRecursiveDoubling, 3, 3 * bytes}}) {
    MemoryNetwork network(ranks, {});
    run(network, ranks, [&, algorithm = algorithm](Transport& end) {
      perform(end, Verb::kAllReduce, algorithm, bytes);
    });
    for (int64_t rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(network.cost_of(rank).messages, messages);
      EXPECT_EQ(network.cost_of(rank).bytes, sent);
    }
  }
}

// Worked example 1: three ranks whose pieces a, b and c are the third, the
// first and the second, for rank 2 ends with a.
TEST(Algorithms, ARingOfThreeAddsInItsOrder) {
  const int64_t piece = 100;
  const auto input = [&](int64_t rank) {
    return rough_input(rank, 3 * piece, at::kFloat);
  };
  const auto sum_from = [&](int64_t first, int64_t of) {
    const auto part = [&](int64_t rank) {
      return input((first + rank) % 3).narrow(0, of * piece, piece);
    };
    return (part(0) + part(1)) + part(2);
  };
  const at::Tensor wanted =
      at::cat({sum_from(1, 0), sum_from(2, 1), sum_from(0, 2)});
  MemoryNetwork network(3, {});
  run(network, 3, [&](Transport& end) {
    const at::Tensor t = input(end.rank());
    const Bounds bounds = even_bounds(t.numel(), 3);
    ring_reduce_scatter(end, elements_of(t), bounds, ReduceOp::kSum);
    const auto own = [&](const at::Tensor& of) {
      return of.narrow(0, end.rank() * piece, piece);
    };
    EXPECT_TRUE(at::equal(own(t), own(wanted)));
    ring_all_gather(end, elements_of(t), bounds);
    EXPECT_TRUE(at::equal(t, wanted));
  });
  for (int64_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(network.cost_of(rank).messages, 4);
    EXPECT_EQ(network.cost_of(rank).bytes, 4 * piece * 4);
  }
}

// Worked example 10: out of all ranks together, in units of the bytes.
TEST(Algorithms, WhatAllRanksSendTogether) {
  const int64_t bytes = 4 * 840;
  const auto all = [&](int64_t ranks, Verb verb) {
    MemoryNetwork network(ranks, {});
    run(network, ranks,
        [&](Transport& end) { perform(end, verb, Algorithm::kRing, bytes); });
    int64_t sum = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      sum += network.cost_of(rank).bytes;
    }
    return sum;
  };
  EXPECT_EQ(all(4, Verb::kReduceScatter), 3 * bytes);
  EXPECT_EQ(all(4, Verb::kAllGather), 3 * bytes);
  EXPECT_EQ(all(2, Verb::kAllReduce), 2 * bytes);
  EXPECT_EQ(all(4, Verb::kAllReduce), 6 * bytes);
  EXPECT_EQ(all(8, Verb::kAllReduce), 14 * bytes);
}

// On the way to a sum fp32, from there on bf16: 4 bytes and 2 an element.
TEST(Algorithms, SumsOfHalfPrecisionTravelInSingle) {
  MemoryNetwork network(4, {});
  run(network, 4, [](Transport& end) {
    all_reduce_tensor(end, Algorithm::kRing, at::ones({400}, at::kBFloat16),
                      ReduceOp::kSum);
  });
  EXPECT_EQ(network.cost_of(0).bytes, 3 * 100 * 4 + 3 * 100 * 2);
}

TEST(Algorithms, RefuseWhatTheyDoNot) {
  MemoryNetwork network(1, {});
  EXPECT_THROW(broadcast(network.end_of(0), Algorithm::kRing, {}, 0), Error);
  EXPECT_FALSE(implements(Algorithm::kTree, Verb::kAllGather));
  EXPECT_FALSE(implements(Algorithm::kRing, Verb::kAllToAll));
  EXPECT_FALSE(implements(Algorithm::kAggregated, Verb::kAllReduce));
  EXPECT_TRUE(implements(Algorithm::kAggregated, Verb::kAllToAll));
  EXPECT_THROW(cost_of(Verb::kAllToAll, Algorithm::kStraight, 4, 64), Error);
  EXPECT_EQ(algorithm_of("ring"), Algorithm::kRing);
  EXPECT_EQ(algorithm_of("star"), std::nullopt);
}

}  // namespace
}  // namespace tessera::comm::algorithms
