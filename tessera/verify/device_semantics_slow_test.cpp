// What a device that runs on its own asks of a step: nothing is read before it
// is awaited, nothing waits which need not, and the host reads once. Ranks are
// threads whose operations are as late as those of such a device may be.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "tessera/core/host_read.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/engine/rank_model.h"
#include "tessera/engine/step_programs.h"
#include "tessera/verify/detail/host_reads.h"
#include "tessera/verify/detail/late_communicator.h"
#include "tessera/verify/random_batch.h"
#include "tests/support/small_run.h"
#include "tests/support/test_device.h"

namespace tessera::verify {
namespace {

using detail::HostReads;
using detail::LateCommunicator;
using engine::RankModel;
using engine::RunConfig;
using program::Instruction;
using program::Op;
using program::Phase;
using testing::small_run;

constexpr int64_t kSteps = 2;

struct Mesh {
  std::string name;
  int64_t ranks;
  RunConfig config;
};

// Two micro-batches a rank of each kind of parallelism, some recomputed where
// that says more.
std::vector<Mesh> meshes() {
  std::vector<Mesh> all;
  const auto add = [&](const std::string& name, int64_t ranks,
                       int64_t zero_stage, const auto& change) {
    RunConfig config = small_run(1, 0);
    config.mesh = {};
    config.zero.stage = zero_stage;
    config.batch = {.global = 8, .micro = 1};
    change(config);
    complete(config, ranks);
    all.push_back({name, ranks, config});
  };
  add("ddp", 2, 0, [](RunConfig& c) { c.mesh.dp = 2; });
  for (const int64_t stage : {1, 2, 3}) {
    add("zero " + std::to_string(stage), 2, stage, [](RunConfig& c) {
      c.mesh.dp_shard = 2;
      c.recompute.mode = "block";
    });
  }
  add("zero 2 over replicas", 4, 2,
      [](RunConfig& c) { c.mesh.dp_shard = c.mesh.dp_replicate = 2; });
  add("tp", 2, 0, [](RunConfig& c) { c.mesh.tp = 2; });
  add("tp with sequence", 2, 0, [](RunConfig& c) {
    c.mesh.tp = 2;
    c.tensor.sequence_parallel = true;
  });
  add("pp", 2, 0, [](RunConfig& c) { c.mesh.pp = 2; });
  add("pp of chunks with zero 1", 4, 1, [](RunConfig& c) {
    c.mesh.pp = c.mesh.dp_shard = 2;
    c.pipeline.schedule = "interleaved";
    c.pipeline.chunks = 2;
  });
  for (const int64_t stage : {1, 3}) {
    add("two versions, zero " + std::to_string(stage), 4, stage,
        [](RunConfig& c) {
          c.mesh.pp = c.mesh.dp_shard = 2;
          c.pipeline.schedule = "pipedream_2bw";
        });
  }
  add("zero 3 over stages, recomputed", 4, 3, [](RunConfig& c) {
    c.mesh.pp = c.mesh.dp_shard = 2;
    c.recompute.mode = "stage";
  });
  add("tp with the least memory", 2, 0, [](RunConfig& c) {
    c.mesh.tp = 2;
    c.recompute.mode = "minimal";
  });
  add("cp whose attention is recomputed", 2, 0, [](RunConfig& c) {
    c.mesh.cp = 2;
    c.context.method = "ulysses";
    c.recompute.mode = "selective";
  });
  add("one rank that reads", 4, 0, [](RunConfig& c) {
    c.mesh.pp = c.mesh.cp = 2;
    c.data.reader = "first";
    c.data.intra_document_masking = true;
  });
  add("ep", 2, 0, [](RunConfig& c) {
    c.model.family = "mixtral";
    c.model.ffn = 64;
    c.model.moe.experts = 4;
    c.mesh.dp = c.mesh.ep = 2;
  });
  return all;
}

using Counts = std::map<std::string, int64_t>;  // by instruction

struct Ran {
  std::vector<double> numbers;     // of every step
  std::vector<at::Tensor> shards;  // of the last
  std::vector<Counts> waits;       // of every step
  std::vector<int64_t> reads;
  Counts expected;
};

// What the program awaits, and what units do together inside of themselves.
Counts waits_of(const program::Program& program,
                const program::RankProgram& moves) {
  Counts counts;
  const auto add = [&](const Instruction& at, int64_t count) {
    if (count > 0) counts[describe(at)] += count;
  };
  const auto operations = [&](const Instruction& of) -> int64_t {
    switch (of.op) {
      case Op::kGatherParameters:
        return std::ssize(moves.units.at(of.unit).gather);
      case Op::kReduceGradients:
        return std::ssize(moves.units.at(of.unit).reduce);
      case Op::kSumGradients:
        return std::ssize(moves.units.at(of.unit).sum);
      case Op::kSumNorm:
        return std::ssize(moves.norm);
      case Op::kShareBatch:
        return std::ssize(moves.batch);
      case Op::kForward:
      case Op::kReplay:
        return std::ssize(moves.units.at(of.unit).forward);
      case Op::kRecompute:
        return std::ssize(moves.units.at(of.unit).again);
      case Op::kBackward:
      case Op::kBackwardInput:
        return std::ssize(moves.units.at(of.unit).backward);
      case Op::kLoss:
        return std::ssize(moves.loss);
      default:
        return 0;
    }
  };
  for (size_t i = 0; i < program.size(); ++i) {
    const Instruction& here = program[i];
    if (program::is_message(here.op)) {
      add(here, here.phase == Phase::kBegin ? 0 : 1);
    } else if (here.phase != Phase::kBegin) {
      // What follows its begin at once was done by that.
      Instruction whole = here;
      whole.phase = Phase::kWhole;
      const bool at_once = here.phase == Phase::kAwait && i > 0 &&
                           program[i - 1] == program::begin(whole);
      add(at_once ? program[i - 1] : here, operations(here));
    }
  }
  return counts;
}

// Steps of every rank, on operations that are late or on time.
std::vector<Ran> run(const Mesh& mesh, bool late,
                     c10::DeviceType device = at::kCPU) {
  std::vector<Ran> all(mesh.ranks);
  RunConfig config = mesh.config;
  config.run.device_types = {device};
  comm::run_threads(mesh.ranks, "shm", [&](comm::Communicator& in_time) {
    LateCommunicator delayed(in_time);
    comm::Communicator& ranks = late ? delayed : in_time;
    RankModel model(config, ranks);
    Ran& mine = all.at(ranks.rank());
    for (int64_t step = 1; step <= kSteps; ++step) {
      const auto input = step_input(
          config, step, 1e-3, [&](int64_t of, int64_t first, int64_t count) {
            return random_batch(config, of, first, count);
          });
      delayed.take_waits();
      const HostReads reads;
      model.step(input);
      mine.reads.push_back(reads.count());
      Counts& waits = mine.waits.emplace_back();
      for (const auto& wait : delayed.take_waits()) {
        // The first step's samples come before its program.
        if (!wait.during.empty()) ++waits[wait.during];
      }
      const auto& actor = model.actor();
      mine.numbers.insert(mine.numbers.end(),
                          {actor.loss_sum(), actor.weight(), actor.aux_sum(),
                           actor.grad_norm()});
    }
    if (late) delayed.expect_all_awaited();
    for (const auto& each : model.composed().parameters->parameters()) {
      mine.shards.push_back(each.shard.to(at::kCPU, /*non_blocking=*/false,
                                          /*copy=*/true));
    }
    const auto& composed = model.composed();
    parallel::Lanes lanes(composed.mesh);
    const auto facts =
        facts_of(config.with(composed.model.config), composed.mesh,
                 composed.mesh.coord_of(ranks.rank()));
    mine.expected = waits_of(model.program(),
                             transfers_of(config, composed.mesh, composed.model,
                                          ranks.rank(), lanes, facts));
  });
  return all;
}

TEST(DeviceSemantics, NothingIsReadBeforeItIsAwaited) {
  for (const Mesh& mesh : meshes()) {
    const auto late = run(mesh, true), in_time = run(mesh, false);
    for (size_t rank = 0; rank < late.size(); ++rank) {
      EXPECT_EQ(late[rank].numbers, in_time[rank].numbers) << mesh.name;
      for (size_t i = 0; i < late[rank].shards.size(); ++i) {
        EXPECT_TRUE(at::equal(late[rank].shards[i], in_time[rank].shards[i]))
            << mesh.name << ", rank " << rank << ", parameter " << i;
      }
    }
  }
}

TEST(DeviceSemantics, NothingWaitsWhichNeedNot) {
  for (const Mesh& mesh : meshes()) {
    for (const Ran& rank : run(mesh, true)) {
      EXPECT_FALSE(rank.expected.empty());
      for (const Counts& waits : rank.waits) {
        EXPECT_EQ(waits, rank.expected) << mesh.name;
      }
    }
  }
}

// And once of every layer of experts, whose sizes it has to know.
TEST(DeviceSemantics, TheHostReadsOnceAStep) {
  for (const Mesh& mesh : meshes()) {
    const int64_t layers = mesh.config.model.layers_with_experts();
    for (const Ran& rank : run(mesh, true)) {
      for (const int64_t reads : rank.reads) {
        EXPECT_EQ(reads, 1 + layers * accumulation(mesh.config)) << mesh.name;
      }
    }
  }
}

// Whose memory nobody reaches from the host.
TEST(DeviceSemantics, ADeviceComputesTheSame) {
  if (!testing::has_test_device()) {
    GTEST_SKIP() << "needs a GPU, beside a LibTorch with CUDA";
  }
  for (const Mesh& mesh : meshes()) {
    const auto here = run(mesh, true);
    const auto there = run(mesh, true, testing::test_device().type());
    for (size_t rank = 0; rank < here.size(); ++rank) {
      EXPECT_EQ(there[rank].reads, here[rank].reads) << mesh.name;
      // Its own program's: on a CPU backwards may be in parts.
      for (const Counts& waits : there[rank].waits) {
        EXPECT_EQ(waits, there[rank].expected) << mesh.name;
      }
      for (size_t i = 0; i < here[rank].numbers.size(); ++i) {
        const double number = here[rank].numbers[i];
        EXPECT_NEAR(there[rank].numbers[i], number, 1e-4 * std::abs(number))
            << mesh.name << ", rank " << rank << ", number " << i;
      }
    }
  }
}

TEST(DeviceSemantics, EveryReadIsSeen) {
  const at::Tensor x = at::ones({3});
  const HostReads reads;
  EXPECT_EQ(x.sum().item<double>(), 3);
  EXPECT_TRUE(at::equal(x, x));
  EXPECT_TRUE((x[0] == 1).is_nonzero());
  EXPECT_EQ(read_on_host(x).numel(), 3);
  EXPECT_EQ(reads.count(), 4);
}

}  // namespace
}  // namespace tessera::verify
