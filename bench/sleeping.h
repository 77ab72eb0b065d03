// Ranks that sleep in the place of computing, a thread each, so that few cores
// act as many devices: what lies between them is as in a run.
#pragma once

#include <sys/prctl.h>

#include <barrier>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "tessera/program/executor.h"

namespace tessera::bench {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::duration<double, std::milli>;

// Messages of all ranks, each once.
template <typename Key>
class Post {
 public:
  void put(const Key& key) {
    {
      const std::scoped_lock lock(mutex_);
      there_.insert(key);
    }
    changed_.notify_all();
  }
  void take(const Key& key) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return there_.contains(key); });
    there_.erase(key);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<Key> there_;
};

// Ranks meet at the norm, and between steps that go on.
template <typename Key>
class Sleeper : public program::Actor {
 public:
  Sleeper(Post<Key>& post, std::barrier<>& all) : post_(post), all_(all) {}

  void zero_gradients() override {}
  void load_inputs(int64_t) override {}
  void load_targets(int64_t) override {}
  void forward(int64_t microbatch, int64_t unit) override {
    sleep({program::Op::kForward, microbatch, unit});
  }
  void loss(int64_t microbatch) override {
    sleep({program::Op::kLoss, microbatch});
  }
  void backward(program::Op part, int64_t microbatch, int64_t unit) override {
    sleep({part, microbatch, unit});
  }
  void hand_activations(int64_t, int64_t) override {}
  void hand_gradients(int64_t, int64_t) override {}
  void begin(const program::Instruction& each, bool) override {
    if (program::is_send(each.op)) post_.put(key_of(each));
  }
  void await(const program::Instruction& each) override {
    if (each.op == program::Op::kSumNorm) return all_.arrive_and_wait();
    if (program::is_message(each.op) && !program::is_send(each.op)) {
      post_.take(key_of(each));
    }
  }
  void norm() override {}
  void clip_gradients() override {}
  void optimizer_step(int64_t) override {}
  void use_version(int64_t) override {}
  void keep_parameters(int64_t) override {}
  void next_version() override { all_.arrive_and_wait(); }

 private:
  virtual void sleep(const program::Instruction& each) = 0;
  virtual Key key_of(const program::Instruction& message) const = 0;

  Post<Key>& post_;
  std::barrier<>& all_;
};

// How long all take together; rank i does act(i).
template <typename Act>
double together_ms(int64_t ranks, const Act& act) {
  std::barrier<> start(ranks + 1);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      prctl(PR_SET_TIMERSLACK, 1);
      start.arrive_and_wait();
      act(rank);
    });
  }
  start.arrive_and_wait();
  const auto begin = Clock::now();
  for (auto& thread : threads) thread.join();
  return Milliseconds(Clock::now() - begin).count();
}

}  // namespace tessera::bench
