#include "tessera/comm/nccl/gpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/comm_config.h"
#include "tessera/core/error.h"

namespace tessera::comm::nccl {
namespace {

using ::testing::HasSubstr;

constexpr auto kGpu = c10::kCUDA, kCpu = c10::kCPU;

TEST(Gpus, EachRankNeedsOneOfItsOwn) {
  EXPECT_EQ(against_sharing({"a"}), "");
  EXPECT_EQ(against_sharing({"a", "b", "c"}), "");
  EXPECT_EQ(against_sharing({"a", "b", "c", "b", "a"}),
            "it needs a GPU for each rank, but ranks 1 and 3 share b. Start "
            "fewer ranks, or use comm.backend auto, which goes through the "
            "host then.");
}

TEST(Gpus, AllRanksComputeOnGpus) {
  EXPECT_EQ(against_devices({kGpu, kGpu}), "");
  EXPECT_THAT(against_devices({kGpu, kCpu, kGpu}),
              HasSubstr("rank 1 computes on cpu. Where all ranks train on "
                        "cuda"));
  EXPECT_THAT(against_devices({}), HasSubstr("rank 0 computes on cpu"));
}

std::string refusal(const std::string& backend,
                    const std::vector<c10::DeviceType>& devices,
                    int64_t num_gpus) {
  CommConfig config;
  config.backend = backend;
  try {
    config.check_gpus(devices, num_gpus);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    return error.what_without_backtrace();
  }
  return "";
}

TEST(Gpus, RanksThatWouldShareOneAreRefusedBeforeTheyStart) {
  EXPECT_EQ(refusal("nccl", {kGpu, kGpu}, 2), "");
  EXPECT_EQ(refusal("nccl", {kGpu, kGpu}, 1),
            "comm.backend is nccl: it needs a GPU for each rank, but ranks 0 "
            "and 1 share GPU 0 of the 1 of this host. Start fewer ranks, or "
            "use comm.backend auto, which goes through the host then.");
  EXPECT_THAT(refusal("nccl", {kGpu, kGpu, kGpu, kGpu}, 3),
              HasSubstr("ranks 0 and 3 share GPU 0 of the 3 of this host"));
  EXPECT_THAT(refusal("nccl", {kGpu, kCpu}, 8),
              HasSubstr("rank 1 computes on cpu"));
  EXPECT_EQ(refusal("auto", {kGpu, kGpu}, 1), "");
  EXPECT_EQ(refusal("shm", {kGpu, kCpu}, 1), "");
}

}  // namespace
}  // namespace tessera::comm::nccl
