// Memory of a device, and runs on it from their begin to their end.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/host_read.h"
#include "tessera/engine/generate.h"
#include "tessera/engine/measured_speeds.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/monitor/memory.h"
#include "tessera/train/replicas.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/trainer.h"
#include "tessera/verify/verify.h"
#include "tests/device/device_runs.h"
#include "tests/support/disk.h"

namespace tessera::testing {
namespace {

// Losses by step of a run that stops behind `steps` of four.
std::vector<double> train(const TemporaryFolder& folder, const Keys& more,
                          int64_t steps, at::Device device) {
  const std::string file = folder.file("tokens");
  const std::string place = folder.path().string();
  Keys keys = {{"data.train", file.c_str()},
               {"data.valid", file.c_str()},
               {"data.format", "tokens_u16"},
               {"run.dir", place.c_str()},
               {"run.steps", "4"},
               {"checkpoint.every", "2"},
               {"monitor.tensorboard", "false"}};
  keys.insert(keys.end(), more.begin(), more.end());
  const auto config = configuration(keys, /*ranks=*/2, device);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    const monitor::RankMemory memory;
    const monitor::DeviceMemory there;
    int64_t polls = 0;
    train::train(config, ranks,
                 {.stop_requested = [&] { return ++polls >= steps; }});
  });
  std::vector<double> losses;
  std::istringstream lines(
      read_file(train::RunFolder(config).path() + "/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const auto values = tessera::detail::parse_json(line, "metrics");
    for (const char* name : {"loss", "valid_loss"}) {
      if (values.contains(name)) losses.push_back(values[name]);
    }
  }
  return losses;
}

void with_tokens(const TemporaryFolder& folder) {
  std::vector<uint16_t> tokens(4000);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = i * i % 61;
  write_file_atomic(folder.file("tokens"),
                    std::string(reinterpret_cast<const char*>(tokens.data()),
                                2 * tokens.size()));
}

// What the states take, by kind; and that nothing is left of it.
TEST(MemoryOfADevice, IsBookedAsTheCpusIs) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  monitor::count_tensor_bytes();
  using Bytes = std::vector<int64_t>;
  const auto held = [] {
    Bytes bytes;
    for (const auto kind : {MemoryKind::kParameters, MemoryKind::kGradients,
                            MemoryKind::kOptimizer}) {
      bytes.push_back(monitor::tensor_bytes(kind).now);
    }
    return bytes;
  };
  for (const auto& [stage, offload] : {std::pair{"0", "none"},
                                       {"1", "none"},
                                       {"3", "none"},
                                       {"3", "optimizer"},
                                       {"3", "all"}}) {
    const auto states = [&, stage = stage,
                         offload = offload](at::Device device) {
      const auto config = configuration(
          {{"mesh.dp", "2"}, {"zero.stage", stage}, {"zero.offload", offload}},
          2, device);
      Bytes bytes;
      comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
        const monitor::RankMemory memory;
        const monitor::DeviceMemory there;
        {
          engine::RankModel model(config, ranks);
          step(model, config, 0);
          if (ranks.rank() == 0) bytes = held();
          EXPECT_GT(monitor::tensor_bytes(MemoryKind::kWork).peak, 0);
        }
        EXPECT_EQ(held(), Bytes({0, 0, 0}));
      });
      return bytes;
    };
    // CUDA's allocator gives whole parts of 512 bytes.
    const int64_t rounding = at::hasCUDA() ? 16 * 512 : 0;
    const Bytes there = states(*device()), here = states(at::kCPU);
    for (size_t kind = 0; kind < here.size(); ++kind) {
      EXPECT_GE(there[kind], here[kind]) << "zero.stage " << stage << offload;
      EXPECT_LE(there[kind], here[kind] + rounding)
          << "zero.stage " << stage << offload;
    }
  }
}

// Scores are most of it. On a GPU, whose loops make masks in their place.
TEST(MemoryOfADevice, OfAttentionWithDropoutIsWhatTheFactsSay) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  monitor::count_tensor_bytes();
  const auto config = configuration({{"model.dropout", "0.1"},
                                     {"model.max_seq", "384"},
                                     {"data.seq_len", "384"},
                                     {"precision.compute", "fp32"}},
                                    1, *device());
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    const monitor::RankMemory memory;
    const monitor::DeviceMemory there;
    engine::RankModel model(config, ranks);
    step(model, config, 0);
    const auto found =
        static_cast<double>(monitor::tensor_bytes(MemoryKind::kWork).peak);
    const auto said = static_cast<double>(engine::memory_plan(config).work);
    EXPECT_NEAR(said, found, 0.1 * found);
  });
}

TEST(MemoryOfADevice, WhereThereIsTooLittleItSaysWhatIsHeldAndWhatHelps) {
  if (!testing::has_test_device()) GTEST_SKIP() << kNoDevice;
  monitor::count_tensor_bytes();
  const TemporaryFolder folder;
  with_tokens(folder);
  std::string said;
  try {
    testing::limit_test_device(1'300'000);
    train(folder, {{"mesh.dp", "2"}, {"batch.micro", "4"}}, /*steps=*/2,
          *device());
  } catch (const Error& error) {
    said = message_of(error);
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
  }
  testing::limit_test_device(0);
  EXPECT_THAT(
      said,
      ::testing::MatchesRegex(
          ".*memory of the device: the test device is out of memory: [0-9]+ "
          "bytes more. This rank held .* of parameters, .* of gradients and "
          ".* of the optimizer's states, and up to .* beside them. Use a "
          "higher zero.stage or a smaller batch.micro or recompute.mode block "
          "or zero.offload optimizer, or all with zero.stage 3, or a device "
          "with more memory.*"));
}

// Others use it too: the same run may have room when it is started again.
TEST(MemoryOfADevice, WhereAStepHadRoomTheRunHasFailedAndMayBeStartedAgain) {
  if (!testing::has_test_device()) GTEST_SKIP() << kNoDevice;
  monitor::count_tensor_bytes();
  const TemporaryFolder folder;
  with_tokens(folder);
  const std::string file = folder.file("tokens");
  const std::string place = folder.path().string();
  const auto config = configuration({{"data.train", file.c_str()},
                                     {"data.format", "tokens_u16"},
                                     {"run.dir", place.c_str()},
                                     {"run.steps", "4"},
                                     {"monitor.tensorboard", "false"}},
                                    /*ranks=*/1, *device());
  int64_t polls = 0;
  const auto poll = [&] {
    if (++polls == 2) testing::limit_test_device(1);
    return false;
  };
  try {
    comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
      const monitor::RankMemory memory;
      const monitor::DeviceMemory there;
      train::train(config, ranks, {.stop_requested = poll});
    });
    ADD_FAILURE() << "there was room";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kFailed);
    EXPECT_THAT(message_of(error),
                ::testing::HasSubstr("memory of the device: "));
    EXPECT_THAT(message_of(error), ::testing::HasSubstr(" This rank held "));
  }
  testing::limit_test_device(0);
  const std::string summary =
      read_file(train::RunFolder(config).path() + "/summary.json");
  EXPECT_THAT(summary, ::testing::HasSubstr("\"exit_code\":1,"));
  EXPECT_THAT(summary, ::testing::HasSubstr(" This rank held "));
}

// Half of a run on the one, and half on the other: its checkpoints are alike.
TEST(RunOnADevice, TrainsAndGoesOnFromTheOthersCheckpoint) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  const TemporaryFolder files = tests::folder_on_disk();
  const std::string folder = files.path().string();
  for (const char* const offload : {"none", "optimizer", "all"}) {
    const Keys zero = {{"mesh.dp", "2"},
                       {"zero.stage", "3"},
                       {"zero.offload", offload},
                       {"zero.offload_folder", folder.c_str()}};
    const TemporaryFolder plain, mixed;
    with_tokens(plain);
    with_tokens(mixed);
    const auto expected = train(plain, zero, /*steps=*/4, at::kCPU);
    Keys late = zero;
    late.emplace_back("monitor.losses_late", "1");
    train(mixed, late, /*steps=*/2, *device());
    const auto found = train(mixed, zero, /*steps=*/4, at::kCPU);
    ASSERT_GE(expected.size(), 4u);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(found[i], expected[i], 1e-9) << offload;
    }
  }
}

// Of a model that only evaluates and writes: the loss of a batch, and tokens.
struct Written {
  double loss = 0;
  std::vector<int64_t> tokens;
};

Written written(const Keys& keys, int64_t ranks,
                const std::vector<c10::DeviceType>& devices) {
  engine::RunConfig config = run_without_device(keys);
  config.batch.micro = 2;
  engine::complete_for_evaluation(config, ranks);
  config.run.device_types = devices;
  Written result;
  comm::run_threads(ranks, "shm", [&](comm::Communicator& world) {
    engine::RankModel model(config, world, program::Purpose::kEvaluation);
    const auto batch = verify::random_batch(config, 0, 0, 2);
    const double loss = read_on_host(model.evaluate(batch).sum).item<double>();
    const at::Tensor sum = at::tensor({loss}, at::kDouble);
    world.world().all_reduce(sum).synchronize();
    const auto tokens = engine::generate(model, world, {5, 17, 2},
                                         {.max_new_tokens = 9, .seed = 3});
    if (world.rank() == 0) result = {sum.item<double>(), tokens};
  });
  return result;
}

// Of any size, and where one byte of a word changes.
TEST(ReplicasOnADevice, AByteThatChangesShows) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  for (const int64_t size : {1, 7, 64}) {
    const at::Tensor here = at::arange(size, at::kByte);
    const uint64_t hash = train::hash_of_bytes(here.to(*device()));
    EXPECT_EQ(train::hash_of_bytes(here.clone().to(*device())), hash);
    for (int64_t i = 0; i < size; ++i) {
      at::Tensor changed = here.clone();
      changed[i].bitwise_xor_(4);
      EXPECT_NE(train::hash_of_bytes(changed.to(*device())), hash) << i;
    }
  }
}

TEST(RunOnADevice, EvaluatesAndWritesWhatTheCpuDoes) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  const c10::DeviceType there = device()->type();
  struct Mesh {
    Keys keys;
    int64_t ranks;
    std::vector<c10::DeviceType> devices;
  };
  for (const auto& [keys, ranks, devices] : {
           Mesh{{}, 1, {there}},
           Mesh{
               {{"model.family", "gpt2"}, {"model.kv_heads", "4"}}, 1, {there}},
           Mesh{{{"mesh.tp", "2"}, {"mesh.pp", "2"}}, 4, {there}},
           Mesh{{{"mesh.pp", "2"}}, 2, {there, at::kCPU}},
           Mesh{{{"model.family", "mixtral"},
                 {"model.moe.experts", "4"},
                 {"mesh.tp", "2"},
                 {"mesh.ep", "2"}},
                2,
                {there}},
       }) {
    const Written here = written(keys, ranks, {at::kCPU});
    const Written found = written(keys, ranks, devices);
    EXPECT_NEAR(found.loss, here.loss, 1e-9 * here.loss) << ranks;
    EXPECT_EQ(found.tokens.size(), 9u);
    EXPECT_EQ(found.tokens, here.tokens) << ranks;
  }
}

TEST(RunOnADevice, MeasuresHowFastItIs) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  std::vector<std::vector<double>> speeds(2);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    speeds.at(ranks.rank()) = engine::measured_speeds(ranks, *device());
  });
  EXPECT_EQ(speeds[0], speeds[1]);
  EXPECT_THAT(speeds[0].size(), ::testing::AnyOf(0, 2));
}

// The mesh on the device, and the one rank on the CPU.
TEST(RunOnADevice, IsProvenBesideOneRankOfTheCpu) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  for (const auto& [keys, ranks] : {
           std::pair{Keys{}, 1},
           {Keys{{"mesh.tp", "2"},
                 {"mesh.pp", "2"},
                 {"batch.micro", "2"},
                 {"recompute.mode", "block"}},
            4},
           {Keys{{"mesh.dp", "2"},
                 {"zero.stage", "3"},
                 {"model.family", "mixtral"},
                 {"model.moe.experts", "4"}},
            2},
       }) {
    const auto found =
        verify::verify(configuration(keys, ranks, *device()), ranks);
    EXPECT_TRUE(found.equal())
        << ranks << " ranks: " << found.differences.front().describe();
    EXPECT_GT(found.gradients, 0) << "nothing was compared";
  }
}

}  // namespace
}  // namespace tessera::testing
