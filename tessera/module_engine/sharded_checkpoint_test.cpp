// Loops of one's own that go on from a checkpoint, on other ranks and in other
// stages, against LibTorch's own loop on one rank, in double.
#include "tessera/module_engine/sharded_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tests/support/small_net.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::HasSubstr;
using tests::batch_of;
using tests::expect_equal;
using tests::kBatch;
using tests::loss_of;
using tests::Values;
using tests::values_of;
using torch::optim::Optimizer;

constexpr int64_t kSteps = 6;

// A scalar, a frozen and an unused parameter, and a buffer among the others.
struct NetImpl : nn::Module {
  nn::Linear in{nullptr}, out{nullptr};
  at::Tensor scale, frozen, unused, seen;
  NetImpl() {
    in = register_module("in", nn::Linear(5, 11));
    out = register_module("out", nn::Linear(11, 3));
    scale = register_parameter("scale", at::ones({}));
    frozen = register_parameter("frozen", at::ones({3}), false);
    unused = register_parameter("unused", at::ones({4, 2}));
    seen = register_buffer("seen", at::zeros({}, at::kLong));
    to(at::kDouble);
    seen = named_buffers()["seen"];
    const at::NoGradGuard no_grad;
    auto generator = at::detail::createCPUGenerator(3);
    for (auto& p : parameters()) p.normal_(0, 0.3, generator);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (is_training()) seen.add_(1);
    return out->forward(at::tanh(in->forward(x) * scale)) + frozen;
  }
};
TORCH_MODULE(Net);

using MakeOptimizer =
    std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>)>;

struct Kind {
  const char* name;
  MakeOptimizer make;
};

template <typename Of, typename Options>
Kind kind(const char* name, const Options& options) {
  return {name, [options](std::vector<at::Tensor> parameters) {
            return std::make_unique<Of>(std::move(parameters), options);
          }};
}

std::vector<Kind> kinds() {
  namespace to = torch::optim;
  return {
      kind<to::Adam>("Adam", to::AdamOptions(1e-2).amsgrad(true)),
      kind<to::AdamW>("AdamW", to::AdamWOptions(1e-2).weight_decay(0.1)),
      kind<to::SGD>("SGD", to::SGDOptions(1e-1).momentum(0.9)),
      kind<to::RMSprop>("RMSprop",
                        to::RMSpropOptions(1e-2).momentum(0.5).centered(true)),
      kind<to::Adagrad>("Adagrad", to::AdagradOptions(1e-2)),
  };
}

void step_by(Optimizer& optimizer, const std::function<at::Tensor()>& loss) {
  optimizer.zero_grad();
  loss().backward();
  optimizer.step();
}

Values one_rank(const Kind& kind) {
  Net net;
  const auto optimizer = kind.make(net->parameters());
  for (int64_t step = 0; step < kSteps; ++step) {
    step_by(*optimizer, [&] { return loss_of(net->forward(batch_of(step))); });
  }
  return values_of(*net);
}

struct Run {
  int64_t ranks;
  int64_t stage;
  int64_t first, last;  // steps
};

// Goes on from the folder where there is something, and saves at its end.
void train(const Run& run, const Kind& kind, const std::string& folder,
           const std::function<void(Net&)>& see = {}) {
  comm::run_threads(run.ranks, "shm", [&](comm::Communicator& ranks) {
    Net net{nullptr};
    comm::in_turn(ranks.world(), [&] { net = Net(); });
    auto model =
        fully_shard(net, mesh::DeviceMesh({.dp_shard = run.ranks}, run.ranks),
                    ranks, {.zero_stage = run.stage});
    const auto optimizer = kind.make(net->parameters());
    ShardedCheckpoint checkpoint(folder, model, *optimizer, ranks);
    const auto loaded = checkpoint.load();
    ASSERT_EQ(loaded ? loaded->step : 0, run.first);
    if (loaded) {
      EXPECT_EQ(loaded->client_state, c10::str("at ", run.first));
    }
    const int64_t micro = kBatch / run.ranks;
    for (int64_t step = run.first; step < run.last; ++step) {
      const at::Tensor mine =
          batch_of(step).narrow(0, ranks.rank() * micro, micro);
      step_by(*optimizer, [&] { return loss_of(model.forward(mine)); });
    }
    checkpoint.save(run.last, c10::str("at ", run.last), /*keep=*/2);
    const auto whole = model.gather();
    if (see) see(net);
  });
}

TEST(ShardedCheckpoint, GoesOnOnOtherRanksAndInOtherStages) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const TemporaryFolder folder;
    const std::string path = folder.path();
    train({2, 3, 0, 2}, kind, path);
    train({3, 1, 2, 3}, kind, path);
    train({1, 0, 3, 4}, kind, path);
    const Values wanted = one_rank(kind);
    train({4, 2, 4, kSteps}, kind, path, [&](Net& net) {
      expect_equal(values_of(*net), wanted, 1e-10);
      EXPECT_EQ(net->seen.item<int64_t>(), kSteps);
    });
    EXPECT_FALSE(std::filesystem::exists(folder.path() / "step-3"));
    EXPECT_TRUE(std::filesystem::exists(folder.path() / "step-4"));
  }
}

std::string refused(const Kind& kind, const std::string& folder) {
  try {
    train({2, 3, 2, 3}, kind, folder);
  } catch (const std::exception& error) {
    return message_of(error);
  }
  return "";
}

TEST(ShardedCheckpoint, RefusesAnotherKindOfOptimizer) {
  const TemporaryFolder folder;
  train({2, 3, 0, 2}, kinds()[1], folder.path());
  EXPECT_THAT(refused(kinds()[2], folder.path()),
              AllOf(HasSubstr("step-2"), HasSubstr("torch::optim::AdamW"),
                    HasSubstr("this one SGD")));
}

void damage(const std::filesystem::path& step) {
  for (const auto& file : std::filesystem::directory_iterator(step)) {
    if (file.path().extension() != ".safetensors") continue;
    std::fstream bytes(file.path(),
                       std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekp(-3, std::ios::end);
    bytes.put('\x5a');
  }
}

// By the manifest: not one byte of a tensor is read for it.
TEST(ShardedCheckpoint, RefusesAnotherKindBeforeItReadsTensors) {
  const TemporaryFolder folder;
  train({2, 3, 0, 2}, kinds()[1], folder.path());
  damage(folder.path() / "step-2");
  EXPECT_THAT(refused(kinds()[2], folder.path()),
              HasSubstr("this one SGD. Go on with the same kind."));
}

// Whose state is another though its kind is the same.
TEST(ShardedCheckpoint, RefusesOtherOptionsThatKeepOtherStates) {
  namespace to = torch::optim;
  const Kind plain = kind<to::AdamW>("AdamW", to::AdamWOptions(1e-2));
  const Kind ams =
      kind<to::AdamW>("AdamW", to::AdamWOptions(1e-2).amsgrad(true));
  for (const auto& [saved, loaded] :
       {std::pair(plain, ams), std::pair(ams, plain)}) {
    const TemporaryFolder folder;
    train({2, 3, 0, 2}, saved, folder.path());
    EXPECT_THAT(refused(loaded, folder.path()),
                AllOf(HasSubstr("step-2"), HasSubstr("amsgrad")));
  }
}

// As where the head alone is trained now.
TEST(ShardedCheckpoint, RefusesAnOptimizerOfFewerParameters) {
  const TemporaryFolder folder;
  train({2, 3, 0, 2}, kinds()[1], folder.path());
  Kind of_one = kinds()[1];
  of_one.make = [make = of_one.make](std::vector<at::Tensor> parameters) {
    parameters.resize(1);
    return make(std::move(parameters));
  };
  EXPECT_THAT(refused(of_one, folder.path()),
              AllOf(HasSubstr("step-2"), HasSubstr("in no group"),
                    HasSubstr("requires_grad_(false)")));
}

TEST(ShardedCheckpoint, AFolderThatCannotBeWrittenIsRefusedAtOnce) {
  const TemporaryFolder folder;
  const std::string file = folder.file("a file");
  std::ofstream(file) << "words";
  EXPECT_THAT(refused(kinds()[1], file + "/checkpoints"),
              HasSubstr("cannot be written there"));
}

TEST(ShardedCheckpoint, RefusesABrokenFile) {
  const TemporaryFolder folder;
  train({2, 3, 0, 2}, kinds()[1], folder.path());
  damage(folder.path() / "step-2");
  EXPECT_THAT(refused(kinds()[1], folder.path()), HasSubstr(".safetensors"));
}

// It has whole tensors, of whose states no shard knows.
TEST(ShardedCheckpoint, RefusesAnOptimizerMadeBeforeSharding) {
  comm::run_threads(1, "shm", [](comm::Communicator& ranks) {
    Net net;
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto model = fully_shard(net, mesh::DeviceMesh({.dp_shard = 1}, 1), ranks);
    try {
      ShardedCheckpoint("folder", model, optimizer, ranks);
      FAIL();
    } catch (const Error& error) {
      EXPECT_THAT(message_of(error),
                  AllOf(HasSubstr("that this module does not have"),
                        HasSubstr("behind fully_shard()")));
    }
  });
}

TEST(ShardedCheckpoint, RefusesATextThatIsNotUtf8) {
  const TemporaryFolder folder;
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    Net net;
    auto model = fully_shard(net, mesh::DeviceMesh({.dp_shard = 1}, 1), ranks);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    ShardedCheckpoint checkpoint(folder.path(), model, optimizer, ranks);
    try {
      checkpoint.save(1, "\xff");
      FAIL();
    } catch (const Error& error) {
      EXPECT_THAT(message_of(error), HasSubstr("client_state is not UTF-8"));
    }
  });
}

TEST(ShardedCheckpoint, RefusesAnOptimizerThatItDoesNotKnow) {
  comm::run_threads(1, "shm", [](comm::Communicator& ranks) {
    Net net;
    auto model = fully_shard(net, mesh::DeviceMesh({.dp_shard = 1}, 1), ranks);
    torch::optim::LBFGS optimizer(net->parameters());
    EXPECT_THROW(ShardedCheckpoint("folder", model, optimizer, ranks), Error);
  });
}

}  // namespace
}  // namespace tessera
