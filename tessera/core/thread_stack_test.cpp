#include "tessera/core/thread_stack.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <semaphore>
#include <thread>

namespace tessera {
namespace {

using ::testing::Contains;
using ::testing::IsEmpty;

std::atomic<bool> goes_on{true};
std::atomic<int> rounds{0};

[[gnu::noinline]] void spins_here() {
  while (goes_on) ++rounds;
}

[[gnu::noinline]] void calls_it() {
  spins_here();
  ++rounds;  // no tail call
}

[[gnu::noinline]] void waits_here(std::binary_semaphore& done) {
  done.acquire();
  ++rounds;
}

TEST(ThreadStack, NamesWhatAThreadIsIn) {
  goes_on = true;
  rounds = 0;
  std::atomic<pid_t> id{0};
  std::thread busy([&] {
    id = this_thread();
    calls_it();
  });
  while (id == 0 || rounds == 0) std::this_thread::yield();
  const auto stack = stack_of(id);
  goes_on = false;
  busy.join();
  // In front of them may be a sanitizer's own.
  const auto inner = std::ranges::find(stack, "tessera::spins_here");
  ASSERT_NE(inner, stack.end());
  ASSERT_NE(inner + 1, stack.end());
  EXPECT_EQ(inner[1], "tessera::calls_it");
  EXPECT_THAT(stack_of(id), IsEmpty());  // it has ended
}

TEST(ThreadStack, WhatWaitsIsNamedAndGoesOnWaiting) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "a thread that waits is given no signal there";
#endif
  std::binary_semaphore done(0);
  std::atomic<pid_t> id{0};
  std::atomic<bool> has_ended{false};
  std::thread waiting([&] {
    id = this_thread();
    waits_here(done);
    has_ended = true;
  });
  while (id == 0) std::this_thread::yield();
  std::vector<std::string> stack;
  for (int tries = 0; tries < 1000; ++tries) {  // it may be on its way there
    stack = stack_of(id);
    if (std::ranges::count(stack, "tessera::waits_here") > 0) break;
  }
  EXPECT_THAT(stack, Contains("tessera::waits_here"));
  EXPECT_FALSE(has_ended);
  done.release();
  waiting.join();
}

TEST(ThreadStack, NamesAreShort) {
  EXPECT_EQ(short_function_name("tessera::(anonymous namespace)::Reader<int, "
                                "std::vector<long> >::next(long, "
                                "std::string const&) const"),
            "tessera::Reader::next");
  EXPECT_EQ(short_function_name("void at::parallel_for<int>(long, long)"),
            "at::parallel_for");
  EXPECT_EQ(
      short_function_name("a::run(int)::{lambda(int)#1}::operator()(int)"),
      "a::run");
  EXPECT_EQ(short_function_name("a::Loop::operator()(int) const"),
            "a::Loop::operator()");
  EXPECT_EQ(short_function_name("a::make_all::{lambda()#2}::operator()()"),
            "a::make_all");
  EXPECT_EQ(short_function_name("read"), "read");
}

}  // namespace
}  // namespace tessera
