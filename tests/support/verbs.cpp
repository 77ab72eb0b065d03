#include "tests/support/verbs.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>

namespace tessera::testing {

using comm::Communicator;
using comm::Group;
using comm::ReduceOp;
using comm::Work;

namespace {

// What rank r holds: ones and twos, so that sums and products of 8 ranks are
// exact in every dtype.
at::Tensor input_of(int64_t rank, int64_t numel, at::ScalarType dtype) {
  return at::arange(numel)
      .mul(rank * 2 + 1)
      .remainder(7)
      .remainder(2)
      .add(1)
      .to(dtype);
}

at::Tensor reduced(int64_t world, int64_t numel, at::ScalarType dtype,
                   ReduceOp op) {
  at::Tensor all = at::empty({world, numel}, at::kDouble);
  for (int64_t r = 0; r < world; ++r) {
    all[r].copy_(input_of(r, numel, dtype));
  }
  switch (op) {
    case ReduceOp::kSum:
      return all.sum(0).to(dtype);
    case ReduceOp::kMean:
      return all.mean(0).to(dtype);
    case ReduceOp::kMin:
      return all.amin(0).to(dtype);
    case ReduceOp::kMax:
      return all.amax(0).to(dtype);
    case ReduceOp::kProduct:
      return all.prod(0).to(at::kLong).to(dtype);
  }
  return {};
}

#define EXPECT_SAME(actual, expected)                                   \
  EXPECT_TRUE(at::equal(actual, expected))                              \
      << #actual << " differs at "                                      \
      << (actual).ne(expected).sum().template item<int64_t>() << " of " \
      << (actual).numel() << " places"

const std::vector<at::ScalarType> kDtypes = {
    at::kDouble, at::kFloat, at::kHalf, at::kBFloat16,
    at::kLong,   at::kInt,   at::kChar, at::kByte};
const std::vector<ReduceOp> kOps = {ReduceOp::kSum, ReduceOp::kMean,
                                    ReduceOp::kMin, ReduceOp::kMax,
                                    ReduceOp::kProduct};

bool defined_for(at::ScalarType dtype, ReduceOp op) {
  return op != ReduceOp::kMean || at::isFloatingType(dtype);
}

void expect_all_reduce(Group& group, int64_t numel, at::ScalarType dtype,
                       ReduceOp op) {
  at::Tensor t = input_of(group.rank(), numel, dtype);
  group.all_reduce(t, op).wait();
  EXPECT_SAME(t, reduced(group.size(), numel, dtype, op));
}

void expect_reduce_scatter(Group& group, int64_t numel, at::ScalarType dtype,
                           ReduceOp op) {
  const int64_t whole = numel * group.size();
  at::Tensor out = at::empty({numel}, dtype);
  group.reduce_scatter(out, input_of(group.rank(), whole, dtype), op).wait();
  EXPECT_SAME(out, reduced(group.size(), whole, dtype, op)
                       .narrow(0, group.rank() * numel, numel));
}

void expect_all_gather(Group& group, int64_t numel, at::ScalarType dtype) {
  at::Tensor out = at::empty({group.size() * numel}, dtype);
  group.all_gather(out, input_of(group.rank(), numel, dtype)).wait();
  for (int64_t r = 0; r < group.size(); ++r) {
    EXPECT_SAME(out.narrow(0, r * numel, numel), input_of(r, numel, dtype));
  }
}

void expect_broadcast(Group& group, int64_t root, int64_t numel,
                      at::ScalarType dtype) {
  at::Tensor t = input_of(group.rank(), numel, dtype);
  group.broadcast(t, root).wait();
  EXPECT_SAME(t, input_of(root, numel, dtype));
}

// Rank r sends rows(r, q) rows to rank q; `scale` 0 makes all of them empty.
void expect_all_to_all(Group& group, int64_t scale, at::ScalarType dtype) {
  const auto rows = [&](int64_t from, int64_t to) {
    return (from * 3 + to * 5) % 4 * scale;
  };
  const auto row_of = [](int64_t from, int64_t to) { return from * 10 + to; };
  std::vector<int64_t> in, out;
  std::vector<at::Tensor> sent, expected;
  for (int64_t r = 0; r < group.size(); ++r) {
    in.push_back(rows(group.rank(), r));
    out.push_back(rows(r, group.rank()));
    sent.push_back(at::full({in.back(), 3}, row_of(group.rank(), r), dtype));
    expected.push_back(
        at::full({out.back(), 3}, row_of(r, group.rank()), dtype));
  }
  const at::Tensor wanted = at::cat(expected);
  at::Tensor output = at::zeros_like(wanted);
  group.all_to_all(output, at::cat(sent), out, in).wait();
  EXPECT_SAME(output, wanted);
}

void expect_equal_exchange(Group& group) {
  const at::Tensor in = at::full({group.size() * 2}, group.rank());
  at::Tensor out = at::empty_like(in);
  group.all_to_all(out, in).wait();
  EXPECT_SAME(out, at::arange(group.size()).repeat_interleave(2).to(in));
}

void expect_gather_in_place(Group& group) {
  at::Tensor all = at::zeros({group.size(), 5});
  all[group.rank()].fill_(group.rank());
  group.all_gather(all, all[group.rank()]).wait();
  const at::Tensor ranks = at::arange(group.size()).to(all).unsqueeze(1);
  EXPECT_SAME(all, ranks.expand({group.size(), 5}));
}

// Each rank sends to the next and receives from the one before it.
void expect_ring(Group& group, int64_t numel) {
  const int64_t next = (group.rank() + 1) % group.size();
  const int64_t before = (group.rank() + group.size() - 1) % group.size();
  Work sent =
      group.send(input_of(group.rank(), numel, at::kFloat), next, numel);
  at::Tensor got = at::zeros({numel});
  group.recv(got, before, numel).wait();
  sent.wait();
  EXPECT_SAME(got, input_of(before, numel, at::kFloat));
}

// Two ranks send each other four messages and take them in another order.
void expect_choice_by_tag(Group& group, int64_t peer) {
  std::vector<Work> sends;
  for (int64_t tag : {3, 1, 2, 1}) {
    const auto value = static_cast<double>(10 * tag + sends.size());
    sends.push_back(group.send(at::full({50000}, value), peer, tag));
  }
  const auto expect = [&](int64_t tag, double value) {
    at::Tensor got = at::zeros({50000});
    group.recv(got, peer, tag).wait();
    EXPECT_SAME(got, at::full({50000}, value));
  };
  expect(2, 22);
  expect(1, 11);
  expect(1, 13);
  expect(3, 30);
  for (Work& send : sends) send.wait();
}

// Many in flight, barriers among them, awaited from the last to the first.
void expect_order_of_calls(Group& group, std::mt19937& random) {
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 12; ++i) {
    const auto numel = static_cast<int64_t>(random() % (i % 4 ? 500 : 90000));
    tensors.push_back(input_of(group.rank(), numel, at::kFloat));
    works.push_back(group.all_reduce(tensors.back()));
    if (random() % 3 == 0) group.barrier();
  }
  for (size_t i = works.size(); i-- > 0;) {
    works[i].wait();
    works[i].wait();
    EXPECT_TRUE(works[i].done());
    EXPECT_SAME(tensors[i], reduced(group.size(), tensors[i].numel(),
                                    at::kFloat, ReduceOp::kSum));
  }
}

// Every rank makes the same groups; those that it is not in are nullptr.
std::vector<Group*> random_groups(Communicator& communicator,
                                  std::mt19937& random) {
  std::vector<Group*> groups;
  for (int g = 0; g < 3; ++g) {
    std::vector<int64_t> ranks;
    for (int64_t r = 0; r < communicator.world_size(); ++r) {
      if (random() % 2 == 0 || r == 0) ranks.push_back(r);
    }
    groups.push_back(communicator.make_group(ranks, "g" + std::to_string(g)));
  }
  return groups;
}

void expect_random_call(Group* group, std::mt19937& random) {
  const auto verb = random() % 5;
  const auto numel = static_cast<int64_t>(random() % 3000);
  const at::ScalarType dtype = kDtypes[random() % kDtypes.size()];
  const auto root = static_cast<int64_t>(random());
  if (group == nullptr) return;
  if (verb == 0) expect_all_reduce(*group, numel, dtype, ReduceOp::kSum);
  if (verb == 1) expect_reduce_scatter(*group, numel, dtype, ReduceOp::kMax);
  if (verb == 2) expect_all_gather(*group, numel, dtype);
  if (verb == 3) expect_broadcast(*group, root % group->size(), numel, dtype);
  if (verb == 4) expect_all_to_all(*group, numel / 100, dtype);
}

}  // namespace

void expect_reductions(Communicator& communicator) {
  Group& world = communicator.world();
  for (at::ScalarType dtype : kDtypes) {
    for (ReduceOp op : kOps) {
      if (!defined_for(dtype, op)) continue;
      expect_all_reduce(world, 1237, dtype, op);
      expect_reduce_scatter(world, 123, dtype, op);
    }
  }
  for (int64_t numel : {0, 1, 2}) {
    expect_all_reduce(world, numel, at::kFloat, ReduceOp::kMean);
    expect_reduce_scatter(world, numel, at::kBFloat16, ReduceOp::kMean);
  }
  // More than fits into shm's stages at once.
  expect_all_reduce(world, 270011, at::kFloat, ReduceOp::kSum);
  expect_reduce_scatter(world, 140009 / world.size(), at::kDouble,
                        ReduceOp::kMean);
}

void expect_moves(Communicator& communicator) {
  Group& world = communicator.world();
  for (at::ScalarType dtype :
       {at::kDouble, at::kBFloat16, at::kBool, at::kShort, at::kHalf}) {
    for (int64_t numel : {0, 1, 237}) {
      expect_all_gather(world, numel, dtype);
      expect_broadcast(world, world.size() - 1, numel, dtype);
      expect_all_to_all(world, numel, dtype);
    }
  }
  expect_equal_exchange(world);
  expect_gather_in_place(world);
  expect_all_gather(world, 270011, at::kFloat);
  expect_broadcast(world, 0, 600011, at::kFloat);
  expect_all_to_all(world, 30011, at::kFloat);
  world.barrier();
}

void expect_messages(Communicator& communicator) {
  Group& world = communicator.world();
  for (int64_t numel : {0, 1, 1000, 200003, 1 << 20}) expect_ring(world, numel);
  if (world.rank() < 2) expect_choice_by_tag(world, 1 - world.rank());
}

void expect_sequences(Communicator& communicator) {
  std::mt19937 random(17);  // the same on every rank
  for (int repeat = 0; repeat < 3; ++repeat) {
    expect_order_of_calls(communicator.world(), random);
  }
  const std::vector<Group*> groups = random_groups(communicator, random);
  for (int i = 0; i < 60; ++i) {
    expect_random_call(groups[random() % groups.size()], random);
  }
}

}  // namespace tessera::testing
