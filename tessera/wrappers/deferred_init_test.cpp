// Modules that are made without memory, beside the same made as ever.
#include "tessera/wrappers/deferred_init.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/wrappers/fully_shard.h"
#include "tessera/wrappers/moe.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;

// Constructors of many kinds: layers' own, init functions, copies, numbers by
// hand, another dtype at the end.
struct NetImpl : nn::Module {
  nn::Embedding tokens{17, 6};
  nn::Sequential path{nn::Linear(6, 9), nn::BatchNorm1d(9), nn::Tanh(),
                      nn::Linear(9, 6)};
  nn::LSTM lstm{nn::LSTMOptions(6, 5)};
  nn::Linear twin{6, 9}, head{6, 17};
  at::Tensor scale, drawn, listed;

  NetImpl() {
    register_module("tokens", tokens);
    register_module("path", path);
    register_module("lstm", lstm);
    register_module("twin", twin);
    register_module("head", head);
    scale = register_parameter("scale", torch::tensor(0.7));
    drawn = register_parameter("drawn", torch::randn({3, 2}) * 0.5 + 1);
    listed = register_buffer("listed", torch::tensor({1.0, 2.5, -3.0}));
    const at::NoGradGuard no_grad;
    nn::init::xavier_uniform_(head->weight);
    nn::init::orthogonal_(path[3]->as<nn::Linear>()->weight);
    twin->weight.copy_(path[0]->as<nn::Linear>()->weight);
    twin->bias.fill_(0.25);
    tokens->weight[0].zero_();
    to(at::kDouble);
  }
};
TORCH_MODULE(Net);

template <typename Make>
auto seeded(const Make& make) {
  torch::manual_seed(11);
  return make();
}

TEST(DeferredInit, HoldsNoMemoryAndLeavesTheGeneratorAlone) {
  DeferredInit deferred;
  torch::manual_seed(11);
  const Net net = deferred.make([] { return Net(); });
  for (const auto& parameter : net->parameters()) {
    EXPECT_TRUE(parameter.is_meta());
    EXPECT_EQ(parameter.scalar_type(), at::kDouble);
    EXPECT_TRUE(deferred.made(parameter));
  }
  EXPECT_TRUE(net->buffers()[0].is_meta());
  const at::Tensor next = torch::rand({3});
  torch::manual_seed(11);
  EXPECT_TRUE(at::equal(next, torch::rand({3})));
}

// Each parameter is freed before the last ones are made.
TEST(DeferredInit, GivesTheSameBitsAsWithout) {
  const Net wanted = seeded([] { return Net(); });
  DeferredInit deferred;
  const Net net = seeded([&] { return deferred.make([] { return Net(); }); });
  std::vector<at::Tensor> meta = net->parameters();
  for (const auto& buffer : net->buffers()) meta.push_back(buffer);
  std::vector<at::Tensor> all = wanted->parameters();
  for (const auto& buffer : wanted->buffers()) all.push_back(buffer);
  size_t given = 0;
  torch::manual_seed(5);  // of no matter
  deferred.replay(meta, /*compute=*/true,
                  [&](size_t i, const at::Tensor& value) {
                    ++given;
                    EXPECT_TRUE(at::equal(value, all[i].detach())) << i;
                  });
  EXPECT_EQ(given, all.size());
}

std::vector<at::Tensor> whole_of(nn::Module& module) {
  std::vector<at::Tensor> values;
  for (const auto& p : module.parameters()) {
    values.push_back(p.detach().clone());
  }
  for (const auto& b : module.buffers()) values.push_back(b.clone());
  return values;
}

TEST(DeferredInit, IsShardedAsAnyModule) {
  const auto wanted = whole_of(*seeded([] { return Net(); }));
  for (const int64_t stage : {0, 1, 2, 3}) {
    comm::run_threads(3, "shm", [&](comm::Communicator& ranks) {
      const mesh::DeviceMesh mesh({.dp_shard = 3}, 3);
      DeferredInit deferred;
      Net net{nullptr};
      comm::in_turn(ranks.world(), [&] {
        torch::manual_seed(ranks.rank() == 0 ? 11 : 12);
        net = deferred.make([] { return Net(); });
      });
      auto model = fully_shard(net, mesh, ranks,
                               {.zero_stage = stage, .deferred = &deferred});
      EXPECT_EQ(net->scale.dim(), 0);
      const auto whole = model.gather();
      const auto found = whole_of(*net);
      ASSERT_EQ(found.size(), wanted.size());
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(at::equal(found[i], wanted[i])) << i;
      }
    });
  }
}

TEST(DeferredInit, ExpertsToo) {
  const auto shards_of = [](bool is_deferred) {
    std::map<std::string, at::Tensor> all;
    std::mutex mutex;
    comm::run_threads(4, "shm", [&](comm::Communicator& ranks) {
      const mesh::DeviceMesh mesh({.dp_shard = 4, .ep = 2}, 4);
      const auto make = [&] {
        return MoE(4, 4, 2, [] { return nn::Linear(4, 4); }, mesh, ranks);
      };
      DeferredInit deferred;
      MoE moe{nullptr};
      comm::in_turn(ranks.world(), [&] {
        moe =
            seeded([&] { return is_deferred ? deferred.make(make) : make(); });
      });
      auto model = fully_shard(moe, mesh, ranks,
                               {.deferred = is_deferred ? &deferred : nullptr});
      const std::lock_guard lock(mutex);
      for (const auto& shard : model.shards()) {
        all[c10::str(shard.name, shard.box.offset)] = shard.values.clone();
      }
    });
    return all;
  };
  const auto wanted = shards_of(false), found = shards_of(true);
  ASSERT_EQ(found.size(), wanted.size());
  for (const auto& [name, value] : wanted) {
    EXPECT_TRUE(at::equal(found.at(name), value)) << name;
  }
}

TEST(DeferredInit, RefusesWhatItDidNotMake) {
  const auto refused = [](const std::function<void(Net&)>& change,
                          bool gives_it) {
    try {
      comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
        DeferredInit deferred;
        Net net = deferred.make([] { return Net(); });
        change(net);
        fully_shard(net, mesh::DeviceMesh(), ranks,
                    {.deferred = gives_it ? &deferred : nullptr});
      });
    } catch (const std::exception& error) {
      return message_of(error);
    }
    return std::string();
  };
  EXPECT_THAT(refused([](Net&) {}, false),
              HasSubstr("options.deferred is null"));
  EXPECT_THAT(refused([](Net& net) { net->to(at::kFloat); }, true),
              HasSubstr("was not made in the DeferredInit's make()"));
}

}  // namespace
}  // namespace tessera
