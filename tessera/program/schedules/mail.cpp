#include "tessera/program/schedules/mail.h"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

namespace tessera::program::schedules {
namespace {

// Whom a task sends to: the place behind a forward's, or before a backward's.
std::optional<Place> next_of(const Pipeline& pipeline, const Task& task,
                             int64_t stage) {
  const Place here{stage, task.chunk};
  if (task.op == Op::kForward) return pipeline.behind(here);
  if (takes_gradients(task)) return pipeline.before(here);
  return std::nullopt;
}

}  // namespace

Mail::Mail(const Schedule& schedule, const Shape& shape, int64_t stage)
    : pipeline_(pipeline_of(schedule, shape)), stage_(stage) {
  std::set<int64_t> stages = {stage};
  for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
    for (const auto& next :
         {pipeline_.before({stage, chunk}), pipeline_.behind({stage, chunk})}) {
      if (next) stages.insert(next->stage);
    }
  }
  for (const int64_t each : stages) {
    for (const Turn& turn : schedule.turns(shape, each)) {
      tasks_of_[each].insert(tasks_of_[each].end(), turn.begin(), turn.end());
    }
  }
  for (const int64_t each : stages) {
    if (each == stage) continue;
    channels_[each].in = letters(each, stage);
    channels_[each].out = letters(stage, each);
  }
}

std::vector<Mail::Letter> Mail::letters(int64_t from, int64_t to) const {
  using Key =
      std::tuple<bool, int64_t, int64_t>;  // forward, chunk, micro-batch
  std::map<Key, size_t> needs;
  const auto& there = tasks_of_.at(to);
  for (size_t i = 0; i < there.size(); ++i) {
    const bool forward = there[i].op == Op::kForward;
    if (!forward && !takes_gradients(there[i])) continue;
    needs[{forward, there[i].chunk, there[i].microbatch}] = i;
  }
  std::vector<Letter> letters;
  const auto& here = tasks_of_.at(from);
  for (size_t i = 0; i < here.size(); ++i) {
    const auto next = next_of(pipeline_, here[i], from);
    if (!next || next->stage != to) continue;
    const bool forward = here[i].op == Op::kForward;
    const Op op = forward ? Op::kReceiveActivations : Op::kReceiveGradients;
    const int64_t m = here[i].microbatch;
    letters.push_back({.receive = {op, m, -1, next->chunk},
                       .sent_at = i,
                       .needed_at = needs.at({forward, next->chunk, m})});
  }
  size_t first = there.size();
  for (size_t i = letters.size(); i-- > 0;) {
    first = std::min(first, letters[i].needed_at);
    letters[i].received_at = first;
  }
  return letters;
}

Program Mail::receives(size_t i) {
  Program receives;
  for (auto& [stage, channel] : channels_) {
    while (channel.received < channel.in.size() &&
           channel.in[channel.received].received_at <= i) {
      receives.push_back(channel.in[channel.received++].receive);
    }
  }
  return receives;
}

// Some message that was received was sent behind the receive of this one.
bool Mail::has_come(const Channel& channel, const Letter& letter) {
  return channel.received > 0 &&
         channel.in[channel.received - 1].sent_at >= letter.received_at;
}

Program Mail::arrived() {
  Program arrived;
  for (auto& [stage, channel] : channels_) {
    while (!channel.under_way.empty() &&
           has_come(channel, channel.out[channel.awaited])) {
      arrived.push_back(await(channel.under_way.front()));
      channel.under_way.erase(channel.under_way.begin());
      ++channel.awaited;
    }
  }
  return arrived;
}

void Mail::sent(const Instruction& send) {
  const bool up = send.op == Op::kSendActivations;
  const Place here{stage_, send.chunk};
  const auto next = up ? pipeline_.behind(here) : pipeline_.before(here);
  channels_.at(next->stage).under_way.push_back(send);
}

Program Mail::rest() {
  Program rest;
  for (auto& [stage, channel] : channels_) {
    for (const auto& send : std::exchange(channel.under_way, {})) {
      rest.push_back(await(send));
    }
  }
  return rest;
}

}  // namespace tessera::program::schedules
