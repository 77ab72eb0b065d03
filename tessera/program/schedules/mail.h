// What a rank receives before each task and when it knows that what it sent has
// come, where ranks go through their tasks in orders that cross.
//
// Order:  a rank receives from another in the order in which that one sends,
//         what it does not need yet included: that was sent before what it
//         waits for. So messages match also where they have no tags.
// Awaits: a send is awaited behind the first message that its receiver sends
//         after it has received it, or at the end of the step: no send is ever
//         waited for, and a program ends wherever its tasks' order is sound.
// Source: causality, as Lamport 1978 has it.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

class Mail {
 public:
  Mail(const Schedule& schedule, const Shape& shape, int64_t stage);

  const std::vector<Task>& tasks() const { return tasks_of_.at(stage_); }
  // Before the i-th task: receives, whole.
  Program receives(size_t i);
  // The sends of which these receives tell that they have come, as awaits.
  Program arrived();
  // A task that sends.
  void sent(const Instruction& send);
  // Those that nothing tells of.
  Program rest();

 private:
  struct Letter {
    Instruction receive;     // as its receiver has it
    size_t sent_at = 0;      // the sender's task
    size_t needed_at = 0;    // the receiver's task
    size_t received_at = 0;  // the receiver's task that it is received before
  };
  // With one of the neighbours.
  struct Channel {
    std::vector<Letter> in, out;
    size_t received = 0;  // of in
    Program under_way;    // of out, in order, from the first not awaited on
    size_t awaited = 0;   // of out
  };
  std::vector<Letter> letters(int64_t from, int64_t to) const;
  static bool has_come(const Channel& channel, const Letter& letter);

  const Pipeline pipeline_;
  const int64_t stage_;
  std::map<int64_t, std::vector<Task>> tasks_of_;  // this rank's, neighbours'
  std::map<int64_t, Channel> channels_;            // by neighbour
};

}  // namespace tessera::program::schedules
