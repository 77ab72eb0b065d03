#include <algorithm>
#include <utility>

#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {
namespace {

// A receive is posted before the work in front of it, behind the messages in
// front of that: what it brings travels while that work runs.
size_t earlier(const Program& program) {
  size_t place = program.size();
  const auto is_bound = [](const Instruction& each) {
    return is_message(each.op) || each.op == Op::kZeroGradients;
  };
  const auto is_posted = [](const Instruction& each) {
    return is_message(each.op) && !is_send(each.op) &&
           each.phase == Phase::kBegin;
  };
  // The block of messages that it is in; receives keep their order, which is
  // that of who sends.
  while (place > 0 && is_message(program[place - 1].op) &&
         !is_posted(program[place - 1])) {
    --place;
  }
  while (place > 0 && !is_bound(program[place - 1])) --place;
  return place;
}

bool begins_message(const Instruction& each) {
  return is_message(each.op) && each.phase == Phase::kBegin;
}

}  // namespace

// A send is awaited when the next of its kind begins: one of each kind is on
// its way behind the rank that goes on.
Program messages(const Program& program, const Units& /*units*/) {
  Program lowered;
  Program sent;
  size_t left = std::ranges::count_if(program, begins_message);
  const auto await_sent = [&](auto which) {
    std::erase_if(sent, [&](const Instruction& each) {
      if (!which(each)) return false;
      lowered.push_back(each);
      return true;
    });
  };
  for (const auto& each : program) {
    const bool begins = each.phase == Phase::kBegin;
    if (is_send(each.op) && !begins) {
      sent.push_back(each);
      continue;
    }
    if (is_send(each.op)) {
      await_sent([&](const Instruction& other) { return other.op == each.op; });
    }
    // Where steps go on, a norm may have messages behind it.
    if (begins_message(each)) --left;
    if (each.op == Op::kNorm && left == 0) {
      await_sent([](const auto&) { return true; });
    }
    const bool receives = is_message(each.op) && !is_send(each.op) && begins;
    const size_t place = receives ? earlier(lowered) : lowered.size();
    lowered.insert(lowered.begin() + static_cast<int64_t>(place), each);
  }
  await_sent([](const auto&) { return true; });
  return lowered;
}

}  // namespace tessera::program::passes
