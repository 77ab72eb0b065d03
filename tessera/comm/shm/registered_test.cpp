#include "tessera/comm/shm/registered.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>

#include "tessera/core/error.h"
#include "tests/support/layouts.h"

namespace tessera::comm::shm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Registered, TensorsAreFoundFromAnyOfTheirBytes) {
  const at::Tensor tensor = empty_registered({3, 1000}, at::kDouble);
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({3, 1000}));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kAlignment, 0U);
  const auto whole = locate(tensor.data_ptr());
  const auto row = locate(tensor[1].data_ptr());
  ASSERT_TRUE(whole && row);
  EXPECT_EQ(row->region, whole->region);
  EXPECT_EQ(row->offset, whole->offset + 8000);
  EXPECT_FALSE(locate(at::empty({4}).data_ptr()));
}

TEST(Registered, MemoryIsGivenToLaterTensors) {
  void* first = empty_registered({1 << 20}, at::kFloat).data_ptr();
  const at::Tensor small = empty_registered({1}, at::kFloat);
  const at::Tensor again = empty_registered({1 << 20}, at::kFloat);
  EXPECT_TRUE(small.data_ptr() == first || again.data_ptr() == first);
}

TEST(Registered, MoreThanAFileHoldsGetsAFileOfItsOwn) {
  at::Tensor large = empty_registered({96 << 20}, at::kByte);
  large.fill_(7);
  EXPECT_EQ(large[-1].item<int>(), 7);
  EXPECT_GT(locate(large.data_ptr())->region_bytes, size_t{96} << 20);
}

TEST(Registered, MoreThanTheHostHasIsRefused) {
  try {
    empty_registered({int64_t{1} << 50}, at::kByte);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                AllOf(HasSubstr("cannot allocate a registered tensor"),
                      HasSubstr("this host has "),
                      HasSubstr("Use fewer ranks on this host")));
  }
}

TEST(Registered, AnotherMappingShowsTheSameBytes) {
  at::Tensor tensor = empty_registered({100}, at::kInt);
  tensor.copy_(at::arange(100));
  PeerRegions regions;
  const char* mapped =
      regions.address_of(getpid(), *locate(tensor.data_ptr()), "itself");
  EXPECT_NE(mapped, tensor.data_ptr());
  EXPECT_EQ(reinterpret_cast<const int32_t*>(mapped)[42], 42);
}

TEST(Registered, GroupsGiveItWhereShmIsBelowThem) {
  const auto gives_it = [](const CommunicatorOptions& options) {
    std::atomic<int64_t> found = 0;
    run_threads(options, [&](Communicator& ranks) {
      const at::Tensor tensor = ranks.empty({8}, at::kFloat);
      found += locate(tensor.data_ptr()).has_value() ? 1 : 0;
    });
    return found.load() == options.world_size;
  };
  EXPECT_TRUE(gives_it(tessera::testing::on_one_host("shm", 2, "auto")));
  EXPECT_TRUE(gives_it(tessera::testing::on_one_host("shm", 2, "ring")));
  EXPECT_TRUE(gives_it(tessera::testing::on_hosts("aabb")));
  EXPECT_FALSE(gives_it(tessera::testing::on_one_host("gloo", 2, "auto")));
}

}  // namespace
}  // namespace tessera::comm::shm
