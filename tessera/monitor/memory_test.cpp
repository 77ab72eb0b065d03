#include "tessera/monitor/memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <barrier>
#include <thread>

#include "tessera/monitor/throughput.h"

namespace tessera::monitor {
namespace {

constexpr int64_t kMiB = 1 << 20;

at::Tensor bytes(int64_t n) { return at::empty({n}, at::kByte); }

TEST(Memory, CountsWhatTensorsHoldNowAndAtMost) {
  count_tensor_bytes();
  count_tensor_bytes();  // twice is once
  reset_tensor_peak();
  const int64_t before = tensor_bytes().now;
  at::Tensor kept = bytes(3 * kMiB);
  EXPECT_EQ(tensor_bytes().now - before, 3 * kMiB);
  {
    const at::Tensor gone = bytes(5 * kMiB);
  }
  EXPECT_EQ(tensor_bytes().now - before, 3 * kMiB);
  EXPECT_EQ(tensor_bytes().peak - before, 8 * kMiB);
  reset_tensor_peak();
  EXPECT_EQ(tensor_bytes().peak - before, 3 * kMiB);
  kept.resize_({7 * kMiB});
  EXPECT_EQ(tensor_bytes().now - before, 7 * kMiB);
  EXPECT_EQ(tensor_bytes().peak - before, 10 * kMiB);  // old and new at once
  kept.reset();
  EXPECT_EQ(tensor_bytes().now, before);
}

TEST(Memory, KindsHavePeaksOfTheirOwn) {
  count_tensor_bytes();
  const RankMemory memory;
  const auto kept = [](MemoryKind kind, int64_t n) {
    const MemoryScope scope(kind);
    return bytes(n);
  };
  at::Tensor parameter = kept(MemoryKind::kParameters, 5 * kMiB);
  parameter.reset();
  at::Tensor gradient = kept(MemoryKind::kGradients, 2 * kMiB);
  EXPECT_EQ(tensor_bytes(MemoryKind::kParameters).now, 0);
  EXPECT_EQ(tensor_bytes(MemoryKind::kParameters).peak, 5 * kMiB);
  EXPECT_EQ(tensor_bytes(MemoryKind::kGradients).peak, 2 * kMiB);
  EXPECT_EQ(tensor_bytes().peak, 5 * kMiB);  // never both
  reset_tensor_peak();
  EXPECT_EQ(tensor_bytes(MemoryKind::kParameters).peak, 0);
  EXPECT_EQ(tensor_bytes(MemoryKind::kGradients).peak, 2 * kMiB);
}

TEST(Memory, EmptyTensorsAndProductsWork) {
  count_tensor_bytes();
  const int64_t before = tensor_bytes().now;
  EXPECT_EQ(bytes(0).numel(), 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes(1).data_ptr()) % 64, 0);
  // oneDNN asks the allocator for scratch memory in its own way.
  for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const at::Tensor a = at::ones({256, 256}, dtype);
    EXPECT_EQ(at::mm(a, a)[3][4].item<double>(), 256.0);
  }
  EXPECT_EQ(tensor_bytes().now, before);
}

TEST(Memory, RanksThatAreThreadsHaveAccountsOfTheirOwn) {
  count_tensor_bytes();
  const int64_t before = tensor_bytes().now;
  std::barrier meet(2);
  at::Tensor handed_over;
  auto rank = [&](int64_t number) {
    const RankMemory memory;
    EXPECT_EQ(tensor_bytes().now, 0);
    at::Tensor mine = bytes((number + 1) * kMiB);
    if (number == 0) handed_over = std::move(mine);
    meet.arrive_and_wait();
    EXPECT_EQ(tensor_bytes().now, (number + 1) * kMiB);
    meet.arrive_and_wait();
    if (number == 1) handed_over.reset();  // freed here, booked to rank 0
    meet.arrive_and_wait();
    EXPECT_EQ(tensor_bytes().now, number == 0 ? 0 : 2 * kMiB);
    EXPECT_EQ(tensor_bytes().peak, (number + 1) * kMiB);
  };
  std::thread other(rank, 1);
  rank(0);
  other.join();
  EXPECT_EQ(tensor_bytes().now, before);
}

TEST(Memory, ATensorMayOutliveItsRank) {
  count_tensor_bytes();
  at::Tensor left;
  {
    const RankMemory memory;
    left = bytes(kMiB);
  }
  {
    const RankMemory another;  // does not inherit what is still held
    EXPECT_EQ(tensor_bytes().now, 0);
  }
  left.reset();
}

TEST(Memory, KnowsTheHost) { EXPECT_GT(host_memory_bytes(), kMiB); }

TEST(Throughput, FollowsFromTokensAndSeconds) {
  const Throughput known = throughput(1000, 0.5, 2, 6e6, 1.2e10);
  EXPECT_DOUBLE_EQ(known.tokens_per_s, 2000);
  EXPECT_DOUBLE_EQ(*known.tflops, 0.006);
  EXPECT_DOUBLE_EQ(*known.mfu, 0.5);
  EXPECT_FALSE(throughput(1000, 0.5, 2, 6e6, std::nullopt).mfu);
  EXPECT_FALSE(throughput(1000, 0.5, 2, 0, 1e12).tflops);
  EXPECT_EQ(throughput(1000, 0, 2, 6e6, 1e12).tokens_per_s, 0);
}

}  // namespace
}  // namespace tessera::monitor
