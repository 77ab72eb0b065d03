#include "tessera/comm/base/routed_backend.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/base/staged_group.h"
#include "tessera/comm/fake/fake_backend.h"
#include "tessera/core/error.h"
#include "tests/support/test_device.h"

namespace tessera::comm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Notes what is called on it.
class NotedBackend final : public fake::FakeBackend {
 public:
  using FakeBackend::FakeBackend;
  std::vector<std::string> calls;

  Pending allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override {
    calls.emplace_back("all_reduce");
    return FakeBackend::allreduce(tensors, options);
  }
  Pending broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override {
    calls.emplace_back("broadcast");
    return FakeBackend::broadcast(tensors, options);
  }
  Pending _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    calls.emplace_back("all_gather");
    return FakeBackend::_allgather_base(output, input, options);
  }
  Pending _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    calls.emplace_back("reduce_scatter");
    return FakeBackend::_reduce_scatter_base(output, input, options);
  }
  Pending alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    calls.emplace_back("all_to_all");
    return FakeBackend::alltoall_base(output, input, output_splits,
                                      input_splits, options);
  }
  Pending barrier(const c10d::BarrierOptions& options) override {
    calls.emplace_back("barrier");
    return FakeBackend::barrier(options);
  }
  Pending send(Tensors& tensors, int peer, int tag) override {
    calls.emplace_back("send");
    return FakeBackend::send(tensors, peer, tag);
  }
  Pending recv(Tensors& tensors, int peer, int tag) override {
    calls.emplace_back("recv");
    return FakeBackend::recv(tensors, peer, tag);
  }
};

// Rank 0 of two.
struct Routed {
  c10::intrusive_ptr<NotedBackend> cpu =
      c10::make_intrusive<NotedBackend>(0, 2);
  c10::intrusive_ptr<NotedBackend> device =
      c10::make_intrusive<NotedBackend>(0, 2);
  std::vector<std::string> failed;
  StagedGroup group;

  Routed()
      : group({.name = "world",
               .backend = "both",
               .ranks = {0, 1},
               .rank = 0,
               .timeout = std::chrono::seconds(1)},
              make_routed(
                  {.backend = cpu,
                   .fail = [this](const auto&) { failed.emplace_back("cpu"); }},
                  {.backend = device,
                   .fail =
                       [this](const auto&) { failed.emplace_back("device"); }},
                  testing::test_device().type())) {}

  void call_all(at::Device on) {
    const at::Tensor piece = at::ones({2}, on), whole = at::ones({4}, on);
    group.all_reduce(piece, ReduceOp::kSum, Mode::kAsync).wait();
    group.all_gather(whole, piece, Mode::kAsync).wait();
    group.reduce_scatter(piece, whole, ReduceOp::kSum, Mode::kAsync).wait();
    group.all_to_all(whole, whole.clone(), {}, {}, Mode::kAsync).wait();
    group.broadcast(piece, 1, Mode::kBlocking).wait();
    group.send(piece, 1, 0).wait();
    group.recv(piece, 1, 0).synchronize();
  }
};

auto every_verb() {
  return ElementsAre("all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                     "broadcast", "send", "recv");
}

TEST(RoutedBackend, SendsEachTensorWhereItsDeviceIsCarried) {
  if (!testing::has_test_device()) GTEST_SKIP() << "needs a GPU";
  Routed routed;
  routed.call_all(testing::test_device());
  EXPECT_THAT(routed.device->calls, every_verb());
  EXPECT_THAT(routed.cpu->calls, IsEmpty());
  routed.call_all(at::kCPU);
  EXPECT_THAT(routed.cpu->calls, every_verb());
  routed.group.barrier();
  EXPECT_EQ(routed.cpu->calls.back(), "barrier");
  EXPECT_THAT(routed.device->calls, every_verb());
  EXPECT_EQ(routed.group.stats().front().calls, 2);
}

TEST(RoutedBackend, RefusesTensorsThatLieApart) {
  if (!testing::has_test_device()) GTEST_SKIP() << "needs a GPU";
  Routed routed;
  const at::Tensor there = at::ones({4}, testing::test_device());
  try {
    routed.group.all_gather(there, at::ones({2}), Mode::kAsync);
    ADD_FAILURE() << "was taken";
  } catch (const Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("both must lie on one device"));
  }
}

TEST(RoutedBackend, FailsBoth) {
  if (!testing::has_test_device()) GTEST_SKIP() << "needs a GPU";
  Routed routed;
  routed.group.fail("it ended");
  EXPECT_THAT(routed.failed, ElementsAre("cpu", "device"));
}

}  // namespace
}  // namespace tessera::comm
