#include "tessera/verify/detail/late_communicator.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::verify::detail {
namespace {

using comm::Communicator;
using comm::Group;
using ::testing::HasSubstr;

// Two ranks, and what each of them says to what they did.
std::string said(
    const std::function<void(Group&, at::Tensor, comm::Work& kept)>& body) {
  std::string text;
  comm::run_threads(2, "shm", [&](Communicator& ranks) {
    LateCommunicator late(ranks);
    comm::Work kept;
    std::string here;
    try {
      const RankContextGuard guard({.doing = "begin SumNorm"});
      body(late.world(), at::ones({4}, at::kDouble), kept);
      late.expect_all_awaited();
    } catch (const Error& error) {
      here = message_of(error);
    }
    if (ranks.rank() == 0) text = here;
  });
  return text;
}

void await(comm::Work& work) {
  const RankContextGuard guard({.doing = "await SumNorm"});
  work.wait();
}

TEST(LateCommunicator, WritesWhereItIsAwaited) {
  EXPECT_EQ(said([](Group& world, const at::Tensor& x, auto&) {
              auto work = world.all_reduce(x);
              EXPECT_EQ(x[0].item<double>(), kPoison);
              await(work);
              EXPECT_EQ(x[0].item<double>(), 2);
              const at::Tensor all = at::empty({8}, at::kDouble);
              work = world.all_gather(all, x);
              await(work);
              EXPECT_EQ(all.sum().item<double>(), 16);
              // The rank's own place is the input.
              const at::Tensor mine = all.narrow(0, 4 * world.rank(), 4);
              mine.fill_(5);
              work = world.all_gather(all, mine);
              await(work);
              EXPECT_EQ(all.sum().item<double>(), 40);
            }),
            "");
}

TEST(LateCommunicator, NamesWhatWasNotAwaited) {
  const std::string who = "begin SumNorm: all_reduce in group world";
  EXPECT_THAT(said([](Group& world, const at::Tensor& x, auto&) {
                world.all_reduce(x);
                world.barrier();
              }),
              HasSubstr(who + " was let go of and never awaited"));
  EXPECT_THAT(said([](Group& world, const at::Tensor& x, comm::Work& kept) {
                kept = world.all_reduce(x);
              }),
              HasSubstr("begun and never awaited"));
}

TEST(LateCommunicator, NamesWhatWasChanged) {
  EXPECT_THAT(said([](Group& world, const at::Tensor& x, auto&) {
                auto work = world.all_reduce(x);
                x.zero_();
                await(work);
              }),
              HasSubstr("writes was changed before it was awaited"));
  EXPECT_THAT(said([](Group& world, const at::Tensor& x, auto&) {
                const at::Tensor all = at::empty({8}, at::kDouble);
                auto work = world.all_gather(all, x);
                x.zero_();
                await(work);
              }),
              HasSubstr("reads was changed before it was awaited"));
}

TEST(LateCommunicator, NamesWaitsThatNobodyNeeds) {
  EXPECT_THAT(
      said([](Group& world, const at::Tensor& x, auto&) {
        world.all_reduce(x).wait();
      }),
      HasSubstr("all_reduce in group world is awaited by \"begin SumNorm\""));
  EXPECT_THAT(said([](Group& world, const at::Tensor& x, auto&) {
                auto work = world.all_reduce(x);
                const RankContextGuard guard({.doing = "Forward 0 unit 1"});
                work.wait();
              }),
              HasSubstr("\"Forward 0 unit 1\", which does not need it"));
  EXPECT_EQ(said([](Group& world, const at::Tensor& x, auto&) {
              const RankContextGuard guard({.doing = "Forward 0 unit 1"});
              world.all_reduce(x).wait();
            }),
            "");
}

}  // namespace
}  // namespace tessera::verify::detail
