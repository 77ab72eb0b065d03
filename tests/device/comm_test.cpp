// Collectives and messages of what a device holds, over the host and over NCCL.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tests/device/device_runs.h"

namespace tessera::testing {
namespace {

// What each verb gives on rank 0 of three, of this rank's numbers.
std::vector<at::Tensor> verbs(at::Device device) {
  std::vector<at::Tensor> given;
  comm::run_threads(3, "shm", [&](comm::Communicator& ranks) {
    comm::Group& group = ranks.world();
    const int64_t rank = group.rank(), next = (rank + 1) % 3;
    const at::Tensor mine = (at::arange(6, at::kDouble) + 10 * rank).to(device);
    std::vector<at::Tensor> all(6);
    all[0] = mine.clone();
    group.all_reduce(all[0]).wait();
    all[1] = at::zeros({18}, mine.options());
    group.all_gather(all[1], mine).wait();
    all[2] = at::zeros({2}, mine.options());
    group.reduce_scatter(all[2], mine, comm::ReduceOp::kMean).wait();
    const std::vector<int64_t> to = {2, 2, 2};
    all[3] = at::zeros({6}, mine.options());
    group.all_to_all(all[3], mine, to, to).wait();
    all[4] = mine.clone();
    group.broadcast(all[4], /*root=*/1, comm::Mode::kBlocking).wait();
    all[5] = at::zeros({6}, mine.options());
    comm::Work sent = group.send(mine, next);
    group.recv(all[5], (rank + 2) % 3).wait();
    sent.wait();
    if (rank != 0) return;
    for (const at::Tensor& each : all) {
      EXPECT_EQ(each.device(), mine.device());
      given.push_back(each.cpu());
    }
  });
  return given;
}

TEST(GroupOnADevice, EveryVerbGivesWhatItGivesOnTheCpu) {
  if (!device()) GTEST_SKIP() << kNoDevice;
  const auto here = verbs(at::kCPU), there = verbs(*device());
  for (size_t i = 0; i < here.size(); ++i) {
    EXPECT_TRUE(at::equal(there[i], here[i])) << i;
  }
}

// A world of one rank, over NCCL where that is built.
TEST(Nccl, AWorldOfOneRankGoesOverIt) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  comm::run_threads(
      {.backend = "nccl", .devices = {at::kCUDA}},
      [](comm::Communicator& ranks) {
        EXPECT_EQ(ranks.backend(), "nccl+shm");
        comm::Group& group = ranks.world();
        for (const auto type : {at::kFloat, at::kBFloat16, at::kLong}) {
          const at::Tensor x =
              at::arange(6, at::TensorOptions(at::kCUDA).dtype(type));
          const at::Tensor sum = x.clone(), gathered = at::empty_like(x),
                           part = at::empty_like(x), moved = at::empty_like(x);
          comm::Work work = group.all_reduce(sum);
          work.wait();
          group.all_gather(gathered, sum).wait();
          group.reduce_scatter(part, gathered).wait();
          group.all_to_all(moved, part, {6}, {6}).wait();
          group.broadcast(moved, 0, comm::Mode::kBlocking).synchronize();
          EXPECT_TRUE(at::equal(moved, x));
        }
        const at::Tensor mean = at::ones({3}, at::kCUDA);
        group.all_reduce(mean, comm::ReduceOp::kMean).wait();
        const at::Tensor flags = at::ones({3}, at::kCUDA).to(at::kBool);
        group.broadcast(flags, 0).wait();
        const at::Tensor none = at::empty({0}, at::kCUDA);
        group.all_reduce(none).synchronize();
        const at::Tensor here = at::ones({3});
        group.all_reduce(here).wait();
        group.barrier();
        EXPECT_TRUE(at::equal(mean.cpu(), here));
        // Its watch sees within moments what the GPU has done.
        while (group.flight_record().find("pending") != std::string::npos) {
          std::this_thread::yield();
        }
        for (const auto& verb : group.stats()) {
          EXPECT_GE(verb.seconds, 0) << verb.verb;
          EXPECT_LT(verb.seconds, 60) << verb.verb;
        }
      });
}

TEST(Nccl, RanksThatShareAGpuAreRefused) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU";
  if (num_gpus() > 1) GTEST_SKIP() << "needs a GPU that ranks share";
  const auto made = [](const char* backend) {
    std::string found;
    comm::run_threads({.backend = backend,
                       .world_size = 2,
                       .local_world_size = 2,
                       .devices = {at::kCUDA, at::kCUDA}},
                      [&](comm::Communicator& ranks) {
                        if (ranks.rank() == 0) found = ranks.backend();
                      });
    return found;
  };
  try {
    made("nccl");
    ADD_FAILURE() << "was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    EXPECT_THAT(message_of(error),
                ::testing::HasSubstr("ranks 0 and 1 share GPU-"));
  }
  EXPECT_EQ(made("auto"), "shm");
}

}  // namespace
}  // namespace tessera::testing
