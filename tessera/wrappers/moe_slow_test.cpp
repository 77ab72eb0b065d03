// MoE on ranks of ep under fully_shard, against one rank, in double.
#include "tessera/wrappers/moe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <optional>

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/wrappers/fully_shard.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;

constexpr int64_t kExperts = 8, kWidth = 6, kSamples = 8, kSteps = 4;

// Two mixtures, of plain linears and of a sequence of layers.
struct MixedImpl : nn::Module {
  nn::Linear in{kWidth, kWidth}, out{5, 3};
  MoE first, second;

  MixedImpl(int64_t k, const mesh::DeviceMesh& mesh, comm::Communicator& ranks)
      : first(
            kWidth, kExperts, k, [] { return nn::Linear(kWidth, kWidth); },
            mesh, ranks),
        second(
            kWidth, /*experts=*/4, /*k=*/1,
            [] {
              return nn::Sequential(nn::Linear(kWidth, 9), nn::Tanh(),
                                    nn::Linear(9, 5));
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

using Values = std::map<std::string, at::Tensor>;

struct Case {
  int64_t ep = 1, world = 1, stage = 3, replicate = 1;
  bool by_replica = false;  // experts are sharded inside each
};

// Steps of AdamW, clipped: the values of all parameters, of all experts.
Values trained(const Case& c, int64_t k) {
  const mesh::DeviceMesh mesh(
      {.dp_replicate = c.replicate,
       .dp_shard = c.world / c.replicate,
       .ep = c.ep,
       .expert_replicate = c.by_replica ? c.replicate : 1},
      c.world);
  Values all;
  std::mutex mutex;
  comm::run_threads(c.world, "shm", [&](comm::Communicator& ranks) {
    Mixed net{nullptr};
    comm::in_turn(ranks.world(), [&] {
      torch::manual_seed(5);
      net = Mixed(k, mesh, ranks);
      net->to(at::kDouble);
    });
    auto model = fully_shard(net, mesh, ranks, {.zero_stage = c.stage});
    torch::optim::AdamW optimizer(net->parameters(),
                                  torch::optim::AdamWOptions(1e-2));
    const int64_t share = kSamples / c.world;
    for (int64_t step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      model.forward(batch_of(step).narrow(0, ranks.rank() * share, share))
          .backward();
      model.clip_grad_norm(0.05);
      optimizer.step();
    }
    const auto shards = model.shards();
    const auto whole = model.gather();
    const std::lock_guard lock(mutex);
    Values here;
    for (const auto& each : net->named_parameters()) {
      here[each.key()] = each.value().detach().clone();
    }
    for (const auto& shard : shards) {
      const std::string& name = shard.name;
      const auto dot = name.find(".experts.");
      std::string local = name;
      if (dot != std::string::npos) {
        const size_t number = dot + 9, end = name.find('.', number);
        const bool is_first = name.starts_with("first");
        const int64_t count = (is_first ? kExperts : 4) / c.ep;
        const int64_t global = std::stoll(name.substr(number, end - number));
        local =
            c10::str(name.substr(0, number), global % count, name.substr(end));
      }
      const auto [known, is_new] = all.emplace(name, here.at(local));
      EXPECT_TRUE(at::equal(known->second, here.at(local))) << is_new;
    }
    EXPECT_EQ(shards.size(), here.size());
  });
  return all;
}

TEST(MoE, EqualsOneRank) {
  for (const int64_t k : {1, 2, 3}) {
    const Values wanted = trained({}, k);
    EXPECT_EQ(wanted.size(), 4 + 2 + 2 * kExperts + 4 * 4);
    for (const int64_t stage : {0, 1, 2, 3}) {
      for (Case c :
           {Case{.ep = 2, .world = 2}, Case{.ep = 4, .world = 4},
            Case{.ep = 2, .world = 4}, Case{.ep = 1, .world = 2},
            Case{.ep = 2, .world = 4, .replicate = 2},
            Case{.ep = 2, .world = 8, .replicate = 2, .by_replica = true}}) {
        c.stage = stage;
        SCOPED_TRACE(c10::str("k ", k, " stage ", stage, " ep ", c.ep,
                              " ranks ", c.world, " replicate ", c.replicate));
        const Values found = trained(c, k);
        ASSERT_EQ(found.size(), wanted.size());
        for (const auto& [name, value] : wanted) {
          EXPECT_LE((found.at(name) - value).norm().item<double>(),
                    1e-10 * value.norm().item<double>())
              << name;
        }
      }
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
  const auto refused = [](int64_t experts, int64_t k, int64_t ep) {
    try {
      comm::run_threads(ep, "shm", [&](comm::Communicator& ranks) {
        const mesh::DeviceMesh mesh({.dp_shard = ep, .ep = ep}, ep);
        MoE(kWidth, experts, k, [] { return nn::Linear(2, 2); }, mesh, ranks);
      });
    } catch (const std::exception& error) {
      return message_of(error);
    }
    return std::string();
  };
  EXPECT_THAT(refused(4, 5, 1), HasSubstr("k is 5 of 4 experts"));
  EXPECT_THAT(refused(7, 2, 2),
              HasSubstr("7 experts do not divide by ep 2. Nearest: 6 or 8."));
}

}  // namespace
}  // namespace tessera
