#include "tessera/comm/gloo/open_collectives.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace tessera::comm::gloo {
namespace {

using ::testing::HasSubstr;

std::string error_of(PendingWork& work) {
  try {
    work.wait();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

// As Gloo's thread does it.
class Collective : public c10d::Work {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  void end() { future_->markCompleted(c10::IValue()); }
  void fail() {
    future_->setError(std::make_exception_ptr(std::runtime_error("cut")));
  }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
};

class OpenCollectivesTest : public ::testing::Test {
 protected:
  c10::intrusive_ptr<PendingWork> track(
      const c10::intrusive_ptr<Collective>& collective,
      std::function<void()> then = {}) {
    return open_->track(collective, 0, c10d::OpType::BROADCAST, {},
                        std::move(then));
  }
  static c10::intrusive_ptr<Collective> collective() {
    return c10::make_intrusive<Collective>();
  }

  const std::shared_ptr<OpenCollectives> open_ =
      std::make_shared<OpenCollectives>();
};

TEST_F(OpenCollectivesTest, OneEndsAsGlooEndsItBehindWhatFollows) {
  const auto good = collective(), bad = collective(), odd = collective();
  bool is_followed = false, follows_failure = false;
  const auto first = track(good, [&] { is_followed = true; });
  const auto second = track(bad, [&] { follows_failure = true; });
  const auto third = track(odd, [] { TORCH_CHECK(false, "what follows"); });
  EXPECT_FALSE(first->isCompleted());
  for (const auto& each : {good, odd}) each->end();
  bad->fail();
  EXPECT_TRUE(first->wait());
  EXPECT_TRUE(is_followed);
  EXPECT_THAT(error_of(*second), HasSubstr("cut"));
  EXPECT_FALSE(follows_failure);
  EXPECT_THAT(error_of(*third), HasSubstr("what follows"));
  open_->wait();
  EXPECT_FALSE(open_->is_held_up());
}

TEST_F(OpenCollectivesTest, WhatGlooDoesNotEndFailsWithTheGroup) {
  const auto stuck = collective(), late = collective();
  const auto first = track(stuck);
  open_->fail("rank 1 is lost");
  EXPECT_THAT(error_of(*first), HasSubstr("rank 1 is lost"));
  EXPECT_THAT(error_of(*track(late)), HasSubstr("rank 1 is lost"));
  open_->wait();
  EXPECT_TRUE(open_->is_held_up());
  for (const auto& each : {stuck, late}) each->end();
  EXPECT_FALSE(open_->is_held_up());
}

}  // namespace
}  // namespace tessera::comm::gloo
