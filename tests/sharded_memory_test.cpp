// What fully_shard() says that it holds, by kind, beside what the allocator
// counts between steps and at most.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/monitor/memory.h"
#include "tests/support/own_modules.h"

namespace tessera::tests {
namespace {

constexpr int64_t kStateBytes = 8;  // of AdamW in fp32

// The worst of all that was compared.
struct Worst {
  double error = 0;
  std::string where = "nothing";
  std::mutex mutex;

  void note(const std::string& what, int64_t said, int64_t found) {
    const double error = std::abs(static_cast<double>(said - found)) /
                         static_cast<double>(std::max<int64_t>(found, 1));
    const std::scoped_lock lock(mutex);
    if (error < this->error) return;
    this->error = error;
    where = c10::str(what, ": said ", said, ", found ", found);
  }
};

// A group's thread lets go of a collective's tensors a moment after those who
// await it go on: the least of some steps is compared.
struct Peaks {
  int64_t parameters = INT64_MAX, gradients = INT64_MAX;
  void note() {
    const auto peak = [](MemoryKind kind) {
      return monitor::tensor_bytes(kind).peak;
    };
    parameters = std::min(parameters, peak(MemoryKind::kParameters));
    gradients = std::min(gradients, peak(MemoryKind::kGradients));
  }
};

void compare(const Kind& kind, const Ways& ways, Worst& worst) {
  const std::string where = c10::str(
      kind.name, ", stage ", ways.options.zero_stage, ", ", ways.replicate, "x",
      ways.shard, ", tp ", ways.tp, ", reshard ",
      ways.options.reshard_after_forward, ", prefetch ", ways.options.prefetch,
      ways.options.compute_dtype ? ", bf16" : "",
      ways.options.reduce_dtype ? ", reduced in it" : "");
  comm::run_threads(ways.world(), "shm", [&](comm::Communicator& ranks) {
    const monitor::RankMemory memory;
    const mesh::DeviceMesh mesh(
        {.dp_replicate = ways.replicate, .dp_shard = ways.shard, .tp = ways.tp},
        ways.world());
    Net net;
    comm::in_turn(ranks.world(), [&] { net = make(kind, 1, at::kFloat); });
    const auto compute = ways.options.compute_dtype;
    for (at::Tensor buffer : net->buffers()) {  // are of the module's code
      if (!compute || !buffer.is_floating_point()) continue;
      buffer.set_data(buffer.to(*compute));
    }
    std::optional<Parallelized> parallel;
    if (ways.tp > 1) parallel.emplace(*net, mesh, ranks, kind.plan);
    auto model = fully_shard(net, mesh, ranks, ways.options);
    torch::optim::AdamW optimizer(net->parameters(),
                                  torch::optim::AdamWOptions(1e-2));
    const auto go_back = [&](int step) {
      at::Tensor rows = rows_of(net, step);
      if (rows.is_floating_point()) rows = rows.to(at::kFloat);
      loss_of(model.forward(rows).to(at::kFloat)).backward();
    };
    go_back(0);
    {
      const MemoryScope scope(MemoryKind::kOptimizer);
      optimizer.step();
    }
    int64_t stateless = 0;  // which no loss reaches: without gradients
    for (const auto& shard : net->parameters()) {
      if (shard.requires_grad() && !shard.grad().defined()) {
        stateless += shard.numel();
      }
    }
    optimizer.zero_grad();
    const ShardedMemory said = model.memory_plan(kStateBytes);
    const auto now = [](MemoryKind kind) {
      return monitor::tensor_bytes(kind).now;
    };
    worst.note(where + ", parameters between steps", said.parameters.held,
               now(MemoryKind::kParameters));
    worst.note(where + ", gradients between steps", said.gradients.held,
               now(MemoryKind::kGradients));
    worst.note(where + ", optimizer", said.optimizer - stateless * kStateBytes,
               now(MemoryKind::kOptimizer));
    Peaks found;
    for (int step = 1; step < 4; ++step) {
      monitor::reset_tensor_peak();
      go_back(step);
      model.clip_grad_norm(0.5);
      optimizer.step();
      optimizer.zero_grad();
      const at::NoGradGuard no_grad;
      at::Tensor rows = rows_of(net, step);
      model.forward(rows.is_floating_point() ? rows.to(at::kFloat) : rows);
      found.note();
    }
    worst.note(where + ", parameters at most", said.parameters.peak(),
               found.parameters);
    worst.note(where + ", gradients at most", said.gradients.peak(),
               found.gradients);
    EXPECT_GE(said.beside,
              std::max(said.parameters.beside, said.gradients.beside));
    EXPECT_LE(said.beside, said.parameters.beside + said.gradients.beside);
  });
}

void expect_told(const Kind& kind, const std::vector<Ways>& all) {
  monitor::count_tensor_bytes();
  Worst worst;
  for (const Ways& ways : all) compare(kind, ways, worst);
  EXPECT_LE(worst.error, 0.02) << worst.where;
  std::printf("%-8s %2zu ways, at most %.2f%%: %s\n", kind.name.c_str(),
              all.size(), 100 * worst.error, worst.where.c_str());
}

// Of every stage on two ranks, what gathers and their order can be.
std::vector<Ways> ways_of_two() {
  std::vector<Ways> all;
  for (int64_t stage : {0, 1, 2, 3}) {
    for (const bool rounds : {false, true}) {
      for (const bool reshards : {true, false}) {
        for (int64_t prefetch : {0, 1}) {
          if (stage == 0 && rounds) continue;  // is refused
          FullyShardOptions options{.zero_stage = stage,
                                    .reshard_after_forward = reshards,
                                    .prefetch = prefetch};
          if (rounds) options.compute_dtype = at::kBFloat16;
          all.push_back({.shard = 2, .options = options});
        }
      }
    }
  }
  return all;
}

class ShardedMemoryOf : public ::testing::TestWithParam<Kind> {};

TEST_P(ShardedMemoryOf, IsWhatTheAllocatorCounts) {
  expect_told(GetParam(), ways_of_two());
}

// Replicas beside shards, shards of shares, gradients in bf16, one rank alone.
TEST_P(ShardedMemoryOf, IsSoInOtherWorlds) {
  std::vector<Ways> all;
  for (int64_t stage : {1, 2, 3}) {
    FullyShardOptions options{.zero_stage = stage, .prefetch = 1};
    all.push_back({.replicate = 2, .shard = 2, .options = options});
    all.push_back({.shard = 2, .tp = 2, .options = options});
    all.push_back({.shard = 3, .options = options});
    options.compute_dtype = at::kBFloat16;
    all.push_back({.options = options});
    options.reduce_dtype = at::kBFloat16;
    all.push_back({.shard = 2, .options = options});
  }
  expect_told(even(GetParam()), all);
}

INSTANTIATE_TEST_SUITE_P(Kinds, ShardedMemoryOf, ::testing::ValuesIn(kinds()),
                         [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace tessera::tests
