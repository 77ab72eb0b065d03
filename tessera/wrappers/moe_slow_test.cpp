// MoE on ranks of ep under fully_shard, against one rank, in double.
#include "tessera/wrappers/moe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <mutex>
#include <optional>

#include "tessera/comm/agree.h"
#include "tessera/wrappers/data_parallel.h"
#include "tessera/wrappers/deferred_init.h"
#include "tessera/wrappers/distributed_data_parallel.h"
#include "tessera/wrappers/fully_shard.h"
#include "tessera/wrappers/parallelize.h"
#include "tessera/wrappers/pipe.h"
#include "tests/support/failure_of_ranks.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;

constexpr int64_t kExperts = 8, kWidth = 6, kSamples = 8, kSteps = 4;

// Two mixtures, of plain linears and of a sequence of layers.
struct MixedImpl : nn::Module {
  nn::Linear in{kWidth, kWidth}, out{5, 3};
  MoE first, second;

  MixedImpl(int64_t k, const MoEOptions& options, const mesh::DeviceMesh& mesh,
            comm::Communicator& ranks)
      : first(
            kWidth, kExperts, k, [] { return nn::Linear(kWidth, kWidth); },
            mesh, ranks, options),
        second(
            kWidth, /*experts=*/4, /*k=*/1,
            [] {
              return nn::Sequential(nn::Linear(kWidth, 8), nn::Tanh(),
                                    nn::Linear(8, 5));
            },
            mesh, ranks) {
    register_module("in", in);
    register_module("first", first);
    register_module("second", second);
    register_module("out", out);
  }

  // The loss of x: (samples, tokens, kWidth).
  at::Tensor forward(const at::Tensor& x) {
    auto [h, balance, counts] = first->forward(at::tanh(in->forward(x)));
    auto [y, other_balance, other_counts] = second->forward(x + h);
    return out->forward(y).pow(2).mean() + 0.1 * balance + 0.2 * other_balance;
  }
};
TORCH_MODULE(Mixed);

// Tokens of one sample are alike, so that some experts get none.
at::Tensor batch_of(int64_t step) {
  const at::Tensor samples = at::arange(kSamples, at::kDouble).view({-1, 1, 1});
  const at::Tensor tokens = at::arange(5, at::kDouble).view({1, -1, 1}) * 0.01;
  const at::Tensor features = at::arange(kWidth, at::kDouble) * 1.7;
  return (samples * 2.3 + tokens + features + 0.3 * static_cast<double>(step))
      .sin();
}

// By name: parameters, put together from all ranks, and buffers.
class Values {
 public:
  void add(const wrappers::ParameterShard& shard) {
    const std::lock_guard lock(mutex_);
    auto& whole = all_[shard.name];
    if (!whole.defined()) {
      whole = at::full(shard.shape, std::nan(""), shard.values.options());
    }
    at::Tensor part = whole;
    for (size_t dim = 0; dim < shard.box.size.size(); ++dim) {
      part = part.narrow(static_cast<int64_t>(dim), shard.box.offset[dim],
                         shard.box.size[dim]);
    }
    const bool is_known = part.isnan().logical_not().all().item<bool>();
    EXPECT_TRUE(!is_known || at::equal(part, shard.values)) << shard.name;
    part.copy_(shard.values);
  }
  void add(const std::string& name, const at::Tensor& buffer) {
    const std::lock_guard lock(mutex_);
    const auto [known, is_new] = all_.emplace(name, buffer.clone());
    EXPECT_TRUE(at::equal(known->second, buffer)) << name << is_new;
  }
  const std::map<std::string, at::Tensor>& all() const { return all_; }

 private:
  std::map<std::string, at::Tensor> all_;
  std::mutex mutex_;
};

void expect_same(const Values& found, const Values& wanted) {
  ASSERT_EQ(found.all().size(), wanted.all().size());
  for (const auto& [name, value] : wanted.all()) {
    EXPECT_LE((found.all().at(name) - value).norm().item<double>(),
              1e-10 * value.norm().item<double>())
        << name;
  }
}

struct Case {
  mesh::Degrees degrees = {};
  FullyShardOptions sharding = {.zero_stage = 3};
  MoEOptions options = {};
  ParallelPlan plan = {};

  int64_t world() const {
    return degrees.pp * degrees.dp_replicate * degrees.dp_shard * degrees.tp;
  }
  std::string describe() const {
    return c10::str(mesh::DeviceMesh(degrees, world()).describe(), " stage ",
                    sharding.zero_stage, " of experts ", sharding.expert_stage);
  }
};

// This rank's part of a batch.
at::Tensor part_of(const at::Tensor& batch, const mesh::DeviceMesh& mesh,
                   int64_t rank) {
  const int64_t parts =
      mesh.degree(mesh::Axis::kDpReplicate) * mesh.degree(mesh::Axis::kDpShard);
  return batch.chunk(parts)[mesh.data_rank_of(mesh.coord_of(rank))];
}

// What gather() shows is what the shards are; nothing to compare where a plan
// has cut it.
void expect_gathered(FullySharded<Mixed>& model, const Values& values) {
  const at::NoGradGuard no_grad;
  const auto whole = model.gather();
  const auto here = model.module()->named_parameters();
  for (const auto& shard : model.shards()) {
    const at::Tensor& all = values.all().at(shard.name);
    const at::Tensor& own = here[shard.name_here];
    EXPECT_TRUE(own.sizes() != all.sizes() || at::equal(own, all));
  }
}

// Steps of AdamW, clipped.
void train(const Case& c, int64_t k, Values& values) {
  const mesh::DeviceMesh mesh(c.degrees, c.world());
  comm::run_threads(c.world(), "shm", [&](comm::Communicator& ranks) {
    Mixed net{nullptr};
    comm::in_turn(ranks.world(), [&] {
      torch::manual_seed(5);
      net = Mixed(k, c.options, mesh, ranks);
      net->to(at::kDouble);
    });
    const auto cut = parallelize(*net, mesh, ranks, c.plan);
    auto model = fully_shard(net, mesh, ranks, c.sharding);
    torch::optim::AdamW optimizer(net->parameters(),
                                  torch::optim::AdamWOptions(1e-2));
    for (int64_t step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      model.forward(part_of(batch_of(step), mesh, ranks.rank())).backward();
      model.clip_grad_norm(0.05);
      optimizer.step();
      balance_experts(*net);
    }
    for (const auto& shard : model.shards()) values.add(shard);
    for (const auto& buffer : net->named_buffers()) {
      values.add(buffer.key(), buffer.value());
    }
    EXPECT_EQ(model.shards().size(), net->parameters().size());
    ranks.world().barrier();
    expect_gathered(model, values);
  });
}

TEST(MoE, EqualsOneRank) {
  const std::vector<mesh::Degrees> meshes = {
      {.dp_shard = 2, .ep = 2},
      {.dp_shard = 4, .ep = 4},
      {.dp_shard = 4, .ep = 2},
      {.dp_shard = 2},
      {.dp_replicate = 2, .dp_shard = 2, .ep = 2},
      {.dp_replicate = 2, .dp_shard = 4, .ep = 2, .expert_replicate = 2}};
  for (const int64_t k : {1, 2, 3}) {
    Values wanted;
    train({}, k, wanted);
    EXPECT_EQ(wanted.all().size(), 4 + 2 + 2 * kExperts + 4 * 4);
    for (const int64_t stage : {0, 1, 2, 3}) {
      for (const auto& degrees : meshes) {
        const Case c{.degrees = degrees, .sharding = {.zero_stage = stage}};
        SCOPED_TRACE(c10::str("k ", k, ": ", c.describe()));
        Values found;
        train(c, k, found);
        expect_same(found, wanted);
      }
    }
  }
}

TEST(MoE, ExpertsInAnotherStageThanTheRest) {
  Values wanted;
  train({}, /*k=*/2, wanted);
  for (const auto& [stage, of_experts] :
       {std::pair{0, 3}, {3, 0}, {1, 3}, {3, 2}, {2, 1}}) {
    for (const int64_t ep : {1, 2}) {
      const Case c{
          .degrees = {.dp_shard = 4, .ep = ep},
          .sharding = {.zero_stage = stage, .expert_stage = of_experts}};
      SCOPED_TRACE(c.describe());
      Values found;
      train(c, /*k=*/2, found);
      expect_same(found, wanted);
    }
  }
}

const std::vector<std::pair<std::string, MoEOptions>>& kinds() {
  static const std::vector<std::pair<std::string, MoEOptions>> all = {
      {"sigmoid, not normalised",
       {.score = GateScore::kSigmoid, .normalize = false, .scale = 1.5}},
      {"groups", {.groups = 4, .top_groups = 2}},
      {"capacity", {.capacity_factor = 1}},
      {"bias", {.score = GateScore::kSigmoid, .bias_rate = 0.03}},
      {"shared, capacity and bias",
       {.capacity_factor = 1.7, .bias_rate = 0.02, .shared = [] {
          return nn::Linear(kWidth, kWidth);
        }}}};
  return all;
}

TEST(MoE, EveryKindEqualsOneRank) {
  for (const auto& [name, options] : kinds()) {
    SCOPED_TRACE(name);
    Values wanted;
    train({.options = options}, /*k=*/2, wanted);
    for (const int64_t ep : {1, 2, 4}) {
      const Case c{.degrees = {.dp_shard = 4, .ep = ep}, .options = options};
      SCOPED_TRACE(c.describe());
      Values found;
      train(c, /*k=*/2, found);
      expect_same(found, wanted);
    }
  }
}

// With etp 1 ranks along tp send a piece of the tokens each; with etp = tp, and
// with ep 1, a plan cuts experts.
TEST(MoE, EqualsOneRankAlongTp) {
  const ParallelPlan trunk = {
      {"in", ParallelStyle::column(Lies::kWhole, Lies::kWhole)}};
  ParallelPlan cut = trunk;
  cut.push_back({"second.experts.*.0", ParallelStyle::column()});
  cut.push_back({"second.experts.*.2", ParallelStyle::row()});
  for (const auto& [name, options] : kinds()) {
    SCOPED_TRACE(name);
    Values wanted;
    train({.options = options}, /*k=*/2, wanted);
    std::vector<Case> cases = {
        {.degrees = {.dp_shard = 2, .tp = 2, .ep = 2}, .plan = trunk},
        {.degrees = {.dp_shard = 2, .tp = 2, .ep = 4}, .plan = trunk},
        {.degrees = {.dp_shard = 2, .tp = 2, .ep = 2, .etp = 2}, .plan = cut},
        {.degrees = {.dp_shard = 2, .tp = 2}, .plan = cut},
        {.degrees = {.dp_shard = 4, .tp = 2, .ep = 2, .etp = 2}, .plan = trunk},
        {.degrees = {.dp_shard = 2, .tp = 4, .ep = 2}},  // ep below tp
        {.degrees = {.tp = 2, .ep = 2}, .sharding = {.zero_stage = 0}},
        {.degrees = {.dp_shard = 2, .ep = 2}, .plan = cut},  // cuts nothing
        {.degrees = {.dp_replicate = 2, .dp_shard = 2, .tp = 2, .ep = 2},
         .sharding = {.zero_stage = 2}}};
    for (Case& c : cases) {
      c.options = options;
      SCOPED_TRACE(c.describe());
      Values found;
      train(c, /*k=*/2, found);
      expect_same(found, wanted);
    }
  }
}

TEST(MoE, CountsWhatItRoutes) {
  comm::run_threads(1, "shm", [](comm::Communicator& ranks) {
    MoE moe(
        kWidth, kExperts, /*k=*/2, [] { return nn::Linear(kWidth, 4); },
        mesh::DeviceMesh(), ranks);
    auto [output, aux_loss, counts] = moe->forward(batch_of(0).to(at::kFloat));
    EXPECT_EQ(output.sizes(), (std::vector<int64_t>{kSamples, 5, 4}));
    EXPECT_EQ(counts.sum().item<int64_t>(), kSamples * 5 * 2);
    EXPECT_GE(aux_loss.item<double>(), 1.0);
    // Every expert alike: as even as can be.
    const at::NoGradGuard no_grad;
    moe->parameters()[0].zero_();
    const auto even = moe->forward(batch_of(0).to(at::kFloat));
    EXPECT_NEAR(even.aux_loss.item<double>(), 1.0, 1e-6);
  });
}

// Token by token: an expert takes the first of a sample up to its capacity, by
// s_e + b_e; the weights are of s_e.
TEST(MoE, IsTheFormula) {
  constexpr int64_t kTwo = 2, kTaken = 2;
  const MoEOptions options{.score = GateScore::kSigmoid,
                           .capacity_factor = 1.7,
                           .bias_rate = 0.1,
                           .shared = [] { return nn::Linear(kWidth, kWidth); }};
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    torch::manual_seed(1);
    MoE moe(
        kWidth, kExperts, kTwo, [] { return nn::Linear(kWidth, kWidth); },
        mesh::DeviceMesh(), ranks, options);
    moe->to(at::kDouble);
    const at::NoGradGuard no_grad;
    at::Tensor bias = moe->named_buffers()["score_bias"];
    bias.copy_(at::arange(kExperts, at::kDouble).cos() * 0.05);
    const at::Tensor x = batch_of(1);
    const at::Tensor found = moe->forward(x).output;

    auto parameters = moe->named_parameters();
    const auto linear = [&](const std::string& name, const at::Tensor& row) {
      return at::linear(row, parameters[name + ".weight"],
                        parameters[name + ".bias"]);
    };
    int64_t dropped = 0;
    for (int64_t sample = 0; sample < kSamples; ++sample) {
      std::vector<int64_t> taken(kExperts, 0);
      for (int64_t t = 0; t < x.size(1); ++t) {
        const at::Tensor row = x[sample][t];
        const at::Tensor s =
            at::sigmoid(at::mv(parameters["gate.weight"], row));
        const at::Tensor best = std::get<1>(at::topk(s + bias, kTwo));
        const at::Tensor sum = s.index_select(0, best).sum();
        at::Tensor y = linear("shared", row);
        for (int64_t i = 0; i < kTwo; ++i) {
          const auto expert = best[i].item<int64_t>();
          if (taken[expert]++ >= kTaken) {
            ++dropped;
            continue;
          }
          y = y + s[expert] / sum *
                      linear("experts." + std::to_string(expert), row);
        }
        EXPECT_TRUE(at::allclose(found[sample][t], y, 1e-12, 1e-12));
      }
    }
    EXPECT_GT(dropped, 0);
    EXPECT_EQ(moe->dropped().item<int64_t>(), dropped);
  });
}

// Each goes up where fewer chose its expert than the mean, of both ranks' rows.
TEST(MoE, BiasesMoveByTheLoadOfAllRanks) {
  const mesh::DeviceMesh mesh({.dp_shard = 2, .ep = 2}, 2);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    MoE moe{nullptr};
    comm::in_turn(ranks.world(), [&] {
      torch::manual_seed(1);
      moe = MoE(
          kWidth, kExperts, /*k=*/2, [] { return nn::Linear(kWidth, 4); }, mesh,
          ranks, MoEOptions{.bias_rate = 0.25});
    });
    moe->to(at::kBFloat16);
    const at::Tensor bias = moe->named_buffers()["score_bias"];
    EXPECT_EQ(bias.scalar_type(), at::kFloat);
    moe->to(at::kDouble);
    at::Tensor load = at::zeros({kExperts}, at::kLong);
    for (int64_t step = 0; step < 2; ++step) {
      load += moe->forward(part_of(batch_of(step), mesh, ranks.rank())).counts;
    }
    moe->eval();
    moe->forward(part_of(batch_of(3), mesh, ranks.rank()));  // is not counted
    moe->train();
    ranks.world().all_reduce(load).synchronize();
    const double mean = load.sum().item<double>() / kExperts;
    const at::Tensor wanted = 0.25 * (mean - load.to(at::kDouble)).sign();
    balance_experts(*moe);
    EXPECT_TRUE(at::equal(moe->named_buffers()["score_bias"], wanted));
    EXPECT_GT(wanted.abs().sum().item<double>(), 0);
    balance_experts(*moe);  // nothing was routed since
    EXPECT_TRUE(at::equal(moe->named_buffers()["score_bias"], wanted));
    moe->forward(part_of(batch_of(0), mesh, ranks.rank()));
    forget_loads(*moe);
    balance_experts(*moe);
    EXPECT_TRUE(at::equal(moe->named_buffers()["score_bias"], wanted));
    const at::Tensor counts =
        moe->forward(part_of(batch_of(0), mesh, ranks.rank())).counts;
    const at::Tensor told = counts.clone();
    balance_experts(*moe);
    EXPECT_TRUE(at::equal(counts, told));  // they are the caller's
  });
}

// x and what its experts make of it.
struct BlockImpl : nn::Module {
  MoE moe;

  BlockImpl(const MoEOptions& options, const mesh::DeviceMesh& mesh,
            comm::Communicator& ranks)
      : moe(
            kWidth, kExperts, /*k=*/2,
            [] { return nn::Linear(kWidth, kWidth); }, mesh, ranks, options) {
    register_module("moe", moe);
  }
  at::Tensor forward(const at::Tensor& x) { return x + moe->forward(x).output; }
};
TORCH_MODULE(Block);

nn::Sequential blocks(const MoEOptions& options, const mesh::DeviceMesh& mesh,
                      comm::Communicator& ranks) {
  nn::Sequential net{nullptr};
  comm::in_turn(ranks.world(), [&] {
    torch::manual_seed(2);
    net =
        nn::Sequential(nn::Linear(kWidth, kWidth), Block(options, mesh, ranks),
                       nn::Tanh(), Block(options, mesh, ranks));
    net->to(at::kDouble);
  });
  return net;
}

// On one rank, and in the stages of a pipeline whose ranks share experts out.
void train_blocks(const Case& c, const std::string& name, Values& values) {
  const mesh::DeviceMesh mesh(c.degrees, c.world());
  comm::run_threads(c.world(), "shm", [&](comm::Communicator& ranks) {
    auto net = blocks(c.options, mesh, ranks);
    auto* const pipeline =
        ranks.make_group(mesh.peers(ranks.rank(), {mesh::Axis::kPp}), "pp");
    auto part = c.degrees.pp == 1 ? net : split(net, {2, 2})[pipeline->rank()];
    auto model = fully_shard(part, mesh, ranks, c.sharding);
    Schedule schedule(
        {{model, pipeline->rank(), c.degrees.pp}}, *pipeline,
        {.schedule = name,
         .num_microbatches = 2,
         .loss = [](const at::Tensor& output, const at::Tensor& target) {
           return torch::mse_loss(output, target);
         }});
    torch::optim::AdamW optimizer(part->parameters(),
                                  torch::optim::AdamWOptions(1e-2));
    for (int64_t step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const at::Tensor x = part_of(batch_of(step), mesh, ranks.rank());
      schedule.step(x, x.cos());
      schedule.clip_grad_norm(0.05);
      optimizer.step();
      balance_experts(*part);
    }
    for (const auto& shard : model.shards()) values.add(shard);
    for (const auto& buffer : part->named_buffers()) {
      values.add(buffer.key(), buffer.value());
    }
  });
}

TEST(MoE, InThePipelinesOfOnesOwn) {
  const MoEOptions options{.capacity_factor = 1.7, .bias_rate = 0.02};
  Values wanted;
  train_blocks({.options = options}, "1f1b", wanted);
  const std::vector<mesh::Degrees> meshes = {
      {.pp = 2, .dp_shard = 2, .ep = 2},
      {.pp = 2, .dp_shard = 4, .ep = 2},
      {.pp = 2, .dp_shard = 2, .tp = 2, .ep = 4}};
  for (const auto& name : {"gpipe", "1f1b", "zb_h1"}) {
    for (const int64_t stage : {0, 2, 3}) {
      for (const auto& degrees : meshes) {
        const Case c{.degrees = degrees,
                     .sharding = {.zero_stage = stage},
                     .options = options};
        SCOPED_TRACE(c10::str(name, ": ", c.describe()));
        Values found;
        train_blocks(c, name, found);
        expect_same(found, wanted);
      }
    }
  }
}

// Worked example, with fewer features: k x d elements of a token in each of the
// two all-to-alls there and back. Of even rows 7/8 leave each of 8 ranks.
TEST(MoE, EvenlyRoutedTokensTravelByTheFormula) {
  static constexpr int64_t kEp = 8, kWide = 32, kTwo = 2;
  comm::run_threads(kEp, "shm", [](comm::Communicator& ranks) {
    const mesh::DeviceMesh mesh({.dp_shard = kEp, .ep = kEp}, kEp);
    MoE moe{nullptr};
    comm::in_turn(ranks.world(), [&] {
      moe = MoE(
          kWide, kWide, kTwo, [] { return nn::Linear(kWide, kWide); }, mesh,
          ranks);
    });
    // A token to each expert, and to the one behind the next three.
    const at::Tensor tokens = at::eye(kWide);
    {
      const at::NoGradGuard no_grad;
      moe->parameters()[0].copy_(tokens * 2 + tokens.roll(4, 0));
    }
    const auto exchanged = [&] {
      std::vector<int64_t> bytes;
      for (auto* group : ranks.groups()) {
        for (const auto& verb : group->stats()) {
          if (verb.verb != "all_to_all") continue;
          bytes.insert(bytes.end(), verb.calls, verb.bytes / verb.calls);
        }
        group->reset_stats();
      }
      return bytes;
    };
    const std::vector<int64_t> twice(2, kWide * kTwo * kWide * 4);
    exchanged();
    const auto found = moe->forward(tokens.clone().requires_grad_());
    EXPECT_TRUE(at::equal(found.counts, at::full({kWide}, kTwo, at::kLong)));
    EXPECT_EQ(exchanged(), twice);
    found.output.sum().backward();
    EXPECT_EQ(exchanged(), twice);
  });
}

// A rank may have no samples, or samples without tokens.
TEST(MoE, TakesNoTokens) {
  const mesh::DeviceMesh mesh({.dp_shard = 2, .ep = 2}, 2);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    std::optional<MoE> moe;
    comm::in_turn(ranks.world(), [&] {
      moe.emplace(
          kWidth, 4, 2, [] { return nn::Linear(kWidth, 3); }, mesh, ranks);
    });
    using Shape = std::vector<int64_t>;
    for (const auto& none : {Shape{0, kWidth}, Shape{3, 0, kWidth}}) {
      const auto x =
          ranks.rank() == 0 ? at::zeros(none) : at::ones({2, 5, kWidth});
      const auto [output, balance, counts] = (*moe)->forward(x);
      (output.sum() + balance).backward();
      if (ranks.rank() > 0) continue;
      EXPECT_EQ(output.numel(), 0);
      EXPECT_EQ(output.size(-1), 3);
      EXPECT_EQ(balance.item<double>(), 0);
      EXPECT_EQ(counts.sum().item<int64_t>(), 0);
    }
  });
}

TEST(MoE, RefusesWhatDoesNotFit) {
  const auto refused = [](int64_t experts, int64_t k, int64_t ep,
                          const MoEOptions& options = {}) {
    return testing::failure_of_ranks(ep, [&](comm::Communicator& ranks) {
      const mesh::DeviceMesh mesh({.dp_shard = ep, .ep = ep}, ep);
      MoE moe(
          kWidth, experts, k, [] { return nn::Linear(kWidth, 2); }, mesh, ranks,
          options);
      moe->forward(batch_of(0).to(at::kFloat));
    });
  };
  EXPECT_THAT(refused(4, 5, 1), HasSubstr("k is 5 of 4 experts"));
  EXPECT_THAT(refused(7, 2, 2),
              HasSubstr("7 experts do not divide by ep 2. Nearest: 6 or 8."));
  EXPECT_THAT(refused(6, 2, 1, {.groups = 4}),
              HasSubstr("6 experts in 4 groups"));
  EXPECT_THAT(refused(8, 3, 1, {.groups = 4, .top_groups = 1}),
              HasSubstr("have 2 experts, and k is 3"));
  EXPECT_THAT(refused(8, 2, 1, {.scale = 0}), HasSubstr("scaled by 0"));
  EXPECT_THAT(refused(8, 2, 1, {.capacity_factor = -1}),
              HasSubstr("capacity_factor is -1"));
  EXPECT_THAT(refused(8, 2, 1, {.bias_rate = -1}),
              HasSubstr("bias_rate is -1"));
  EXPECT_THAT(refused(8, 2, 1, {.capacity_factor = 0.5}),
              HasSubstr("Use 0.8 or more"));
}

// Whole stages take means over replicas, which have other experts here.
TEST(MoE, RefusesReplicasWithOtherExperts) {
  const mesh::DeviceMesh mesh({.dp_shard = 2, .ep = 2}, 2);
  const auto refused = [&](bool has_replicas) {
    return testing::failure_of_ranks(2, [&](comm::Communicator& ranks) {
      auto net = blocks({}, mesh, ranks);
      auto* const alone = ranks.make_group({ranks.rank()}, "alone");
      Schedule pipe({{net, 0, 1}}, *alone,
                    {.replicas = has_replicas ? &ranks.world() : nullptr});
      pipe.clip_grad_norm(1);
    });
  };
  EXPECT_THAT(refused(/*has_replicas=*/true),
              HasSubstr("have other experts of the MoE"));
  EXPECT_THAT(refused(/*has_replicas=*/false),
              HasSubstr("whose experts lie on 2 ranks"));
}

TEST(MoE, RefusesMeshesThatAreOthers) {
  const mesh::DeviceMesh mesh({.dp_shard = 2, .tp = 2, .ep = 2}, 4);
  const mesh::DeviceMesh other({.dp_shard = 2, .tp = 2, .ep = 2, .etp = 2}, 4);
  EXPECT_THAT(testing::failure_of_ranks(4,
                                        [&](comm::Communicator& ranks) {
                                          fully_shard(blocks({}, mesh, ranks),
                                                      other, ranks);
                                        }),
              HasSubstr("Give both the same mesh"));
  EXPECT_THAT(testing::failure_of_ranks(4,
                                        [&](comm::Communicator& ranks) {
                                          auto net = blocks({}, mesh, ranks);
                                          parallelize(*net, other, ranks, {});
                                        }),
              HasSubstr("Give both the same mesh"));
  EXPECT_THAT(testing::failure_of_ranks(2,
                                        [&](comm::Communicator& ranks) {
                                          Block(MoEOptions(), mesh, ranks);
                                        }),
              HasSubstr("the mesh is of 4 ranks"));
}

// Of each of these an expert sees tokens of ranks beyond the group.
TEST(MoE, RefusesDataParallelismThatLeavesTokensOut) {
  const auto refused = [](const mesh::Degrees& degrees, int64_t world,
                          const std::vector<std::vector<int64_t>>& groups) {
    const mesh::DeviceMesh mesh(degrees, world);
    return testing::failure_of_ranks(world, [&](comm::Communicator& ranks) {
      auto net = blocks({}, mesh, ranks);
      for (const auto& group : groups) {
        if (std::ranges::count(group, ranks.rank()) == 0) continue;
        DistributedDataParallel(net, *ranks.make_group(group, "data"));
      }
    });
  };
  EXPECT_THAT(refused({.dp_shard = 2, .tp = 4, .ep = 2}, 8,
                      {{0, 4}, {1, 5}, {2, 6}, {3, 7}}),
              HasSubstr("which see other tokens"));
  EXPECT_THAT(refused({.dp_shard = 4, .ep = 2}, 4, {{0, 2}, {1, 3}}),
              HasSubstr("which see other tokens"));
  EXPECT_THAT(refused({.dp_shard = 2, .ep = 2}, 2, {{0, 1}}),
              HasSubstr("have other experts"));
  // Ranks along tp have all tokens of one rank along dp.
  EXPECT_EQ(refused({.dp_shard = 2, .tp = 2, .ep = 2}, 4, {{0, 2}, {1, 3}}),
            "");
}

TEST(MoE, RefusesWhatBiasesAndGatesCannotDo) {
  const MoEOptions biases{.bias_rate = 0.1};
  const mesh::DeviceMesh two({.dp_shard = 2}, 2), cut({.tp = 2}, 2);
  EXPECT_THAT(
      testing::failure_of_ranks(
          2,
          [&](comm::Communicator& ranks) {
            fully_shard(blocks(biases, two, ranks), two, ranks).join([] {});
          }),
      HasSubstr("a MoE with biases"));
  EXPECT_THAT(testing::failure_of_ranks(
                  1,
                  [&](comm::Communicator& ranks) {
                    const auto make = [&] {
                      return blocks(biases, mesh::DeviceMesh(), ranks);
                    };
                    DataParallel<nn::Sequential>(make(), {at::kCPU, at::kCPU},
                                                 make);
                  }),
              HasSubstr("a MoE with biases"));
  EXPECT_THAT(testing::failure_of_ranks(
                  2,
                  [&](comm::Communicator& ranks) {
                    auto net = blocks({}, cut, ranks);
                    const auto parallel =
                        parallelize(*net, cut, ranks,
                                    {{"*.moe.gate", ParallelStyle::column()}});
                    net->forward(batch_of(0));
                  }),
              HasSubstr("the gate has 4 of 8 experts on this rank"));
}

// What is recorded is made where fully_shard() takes it, in the type of to().
TEST(MoE, MayBeMadeWithoutMemory) {
  const mesh::DeviceMesh mesh({.dp_shard = 2, .ep = 2}, 2);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    DeferredInit deferred;
    const auto net = deferred.make([&] {
      nn::Sequential made(Block(MoEOptions{.bias_rate = 0.1}, mesh, ranks));
      made->to(at::kDouble);
      return made;
    });
    auto model = fully_shard(net, mesh, ranks, {.deferred = &deferred});
    model.forward(part_of(batch_of(0), mesh, ranks.rank())).sum().backward();
    balance_experts(*model.module());
    const at::Tensor bias = net->named_buffers()["0.moe.score_bias"];
    EXPECT_EQ(bias.scalar_type(), at::kDouble);
    EXPECT_GT(bias.abs().max().item<double>(), 0.09);
  });
}

// Ranks along tp have other experts: there is no whole one to cut.
TEST(MoE, RefusesToCutExpertsThatAreWhole) {
  const mesh::DeviceMesh mesh({.tp = 2, .ep = 2}, 2);
  EXPECT_THAT(testing::failure_of_ranks(
                  2,
                  [&](comm::Communicator& ranks) {
                    auto net = blocks({}, mesh, ranks);
                    parallelize(*net, mesh, ranks,
                                {{"1.moe.experts.0", ParallelStyle::column()}});
                  }),
              HasSubstr("Set etp to tp"));
}

}  // namespace
}  // namespace tessera
