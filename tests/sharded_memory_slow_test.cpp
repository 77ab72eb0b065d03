// What fully_shard() says that it holds, by kind, beside what the allocator
// counts between steps and at most.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/monitor/memory.h"
#include "tessera/wrappers/moe.h"
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

// What is held of a module, and where.
struct Subject {
  std::string name;
  std::function<Net(const mesh::DeviceMesh&, comm::Communicator&)> make;
  mesh::DeviceMesh mesh;
  FullyShardOptions options = {};
  ParallelPlan plan = {};
};

void compare(const Subject& subject, Worst& worst) {
  const FullyShardOptions& options = subject.options;
  const std::string where = c10::str(
      subject.name, ", stage ", options.zero_stage, ", ",
      subject.mesh.describe(), ", reshard ", options.reshard_after_forward,
      ", prefetch ", options.prefetch, options.compute_dtype ? ", bf16" : "",
      options.reduce_dtype ? ", reduced in it" : "");
  const int64_t world = subject.mesh.world_size();
  comm::run_threads(world, "shm", [&](comm::Communicator& ranks) {
    const monitor::RankMemory memory;
    Net net;
    comm::in_turn(ranks.world(),
                  [&] { net = subject.make(subject.mesh, ranks); });
    const auto compute = subject.options.compute_dtype;
    for (at::Tensor buffer : net->buffers()) {  // are of the module's code
      if (!compute || !buffer.is_floating_point()) continue;
      buffer.set_data(buffer.to(*compute));
    }
    std::optional<Parallelized> parallel;
    if (!subject.plan.empty()) {
      parallel.emplace(*net, subject.mesh, ranks, subject.plan);
    }
    auto model = fully_shard(net, subject.mesh, ranks, subject.options);
    const ShardedMemory early = model.memory_plan(kStateBytes);
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
    EXPECT_EQ(early.held(), said.held());
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
  for (const Ways& ways : all) {
    const mesh::Degrees degrees{
        .dp_replicate = ways.replicate, .dp_shard = ways.shard, .tp = ways.tp};
    compare(
        {.name = kind.name,
         .make = [&](const mesh::DeviceMesh&,
                     comm::Communicator&) { return make(kind, 1, at::kFloat); },
         .mesh = mesh::DeviceMesh(degrees, ways.world()),
         .options = ways.options,
         .plan = ways.tp > 1 ? kind.plan : ParallelPlan()},
        worst);
  }
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

// A mixture of experts between two layers.
struct ExpertsImpl : NetImpl {
  nn::Linear in{6, 6}, out{6, 3};
  MoE experts;
  ExpertsImpl(const mesh::DeviceMesh& mesh, comm::Communicator& ranks)
      : experts(
            /*hidden=*/6, /*experts=*/8, /*k=*/2,
            [] { return nn::Linear(6, 6); }, mesh, ranks) {
    register_module("in", in);
    register_module("experts", experts);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) override {
    const auto [h, balance, counts] =
        experts->forward(at::tanh(in->forward(x)).unsqueeze(1));
    return out->forward(h.squeeze(1)) + balance;
  }
};

TEST(ShardedMemoryOfExperts, IsWhatTheAllocatorCounts) {
  monitor::count_tensor_bytes();
  Worst worst;
  for (int64_t stage : {0, 1, 2, 3}) {
    for (int64_t ep : {1, 2, 4}) {
      compare({.name = c10::str("experts, ep ", ep),
               .make =
                   [](const mesh::DeviceMesh& mesh, comm::Communicator& ranks) {
                     return std::make_shared<ExpertsImpl>(mesh, ranks);
                   },
               .mesh = mesh::DeviceMesh({.dp_shard = 4, .ep = ep}, 4),
               .options = {.zero_stage = stage, .prefetch = 1}},
              worst);
    }
  }
  EXPECT_LE(worst.error, 0.02) << worst.where;
}

INSTANTIATE_TEST_SUITE_P(Kinds, ShardedMemoryOf, ::testing::ValuesIn(kinds()),
                         [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace tessera::tests
