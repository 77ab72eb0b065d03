#include "tessera/program/simulator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tessera/program/detail/classes.h"
#include "tessera/program/detail/transfers.h"

namespace tessera::program {
namespace {

constexpr double kUnknown = -1;

// A group of ranks; all that look like it are one.
struct Group {
  std::string name;
  std::vector<size_t> classes;
  int64_t ranks = 0;
  bool across_stages = false;
  struct Collective {
    size_t begun = 0;  // by so many classes
    double begin = 0;  // when the last of them has
    double end = kUnknown;
  };
  std::vector<Collective> all;
};

// What was begun and is awaited.
struct Pending {
  int64_t group = -1;  // -1: of files, which are done at `end`
  size_t index = 0;
  double end = kUnknown;
};

// A message on its way to its receiver.
struct Letter {
  double arrives = kUnknown;
  bool received = false;
};

enum class Cause { kBubble, kExposed, kFiles };

// One class of ranks on its way through its program.
struct Follower {
  const RankProgram* of = nullptr;
  RankTimes times;
  double now = 0;
  size_t next = 0;
  // Of the next instruction: that it was come to, and how many of its
  // collectives are over.
  bool entered = false;
  size_t part = 0;
  std::vector<std::vector<Pending>> pending;  // by op and unit
  std::vector<int64_t> group_of, begun;       // by lane
  std::vector<size_t> peers;                  // by rank along pp: classes
  std::vector<double> link_free;              // by rank along pp
  std::vector<Letter> letters;    // that it is to receive; see slot_of()
  std::vector<double> send_over;  // of those that it sends, likewise
  double files_free = 0;
  bool queued = true;
};

class Simulator {
 public:
  Simulator(const World& world, const Costs& costs)
      : world_(world), costs_(costs), classes_(detail::sort_ranks(world)) {
    for (int64_t rank : classes_.first) followers_.push_back(follow(rank));
    for (size_t i = 0; i < followers_.size(); ++i) {
      ready_.push_back(i);
      find_peers(followers_[i]);
    }
    for (int64_t each : classes_.of_rank) ++followers_[each].times.num_ranks;
    find_groups();
  }

  Simulation run() {
    while (!ready_.empty()) {
      Follower& follower = followers_[ready_.back()];
      ready_.pop_back();
      follower.queued = false;
      while (follower.next < follower.of->program.size() && advance(follower)) {
      }
    }
    for (const auto& each : followers_) expect_end(each);
    for (const auto& each : followers_) expect_received(each);
    return finish();
  }

 private:
  Follower follow(int64_t rank) {
    Follower follower;
    follower.of = world_.programs[rank];
    follower.times.rank = rank;
    follower.times.busy = {kUnknown, kUnknown};
    const Program& program = follower.of->program;
    follower.times.at.resize(program.size());
    int64_t units = 0;
    for (const auto& each : program) {
      microbatches_ = std::max(microbatches_, each.microbatch + 1);
      chunks_ = std::max(chunks_, each.chunk + 1);
      units = std::max(units, each.unit + 1);
    }
    units_ = std::max(units_, units);
    follower.begun.assign(world_.lanes.size(), 0);
    follower.link_free.assign(follower.of->stages, 0);
    return follower;
  }

  void find_peers(Follower& follower) {
    const size_t letters = 2 * chunks_ * microbatches_;
    follower.letters.resize(letters);
    follower.send_over.assign(letters, 0);
    follower.pending.resize((static_cast<size_t>(Op::kReleaseParameters) + 1) *
                            (units_ + 1));
    if (world_.pipeline < 0) return;
    for (int64_t rank : world_.members(follower.times.rank, world_.pipeline)) {
      follower.peers.push_back(classes_.of_rank.at(rank));
    }
  }

  void find_groups() {
    std::map<std::pair<size_t, std::set<size_t>>, int64_t> known;
    for (auto& follower : followers_) {
      for (size_t lane = 0; lane < world_.lanes.size(); ++lane) {
        const auto ranks =
            world_.members(follower.times.rank, static_cast<int64_t>(lane));
        std::set<size_t> classes;
        for (int64_t rank : ranks) classes.insert(classes_.of_rank.at(rank));
        const auto [found, is_new] = known.try_emplace(
            {lane, classes}, static_cast<int64_t>(groups_.size()));
        follower.group_of.push_back(found->second);
        if (is_new) groups_.push_back(group_of(lane, classes, ranks.size()));
        TORCH_INTERNAL_ASSERT(groups_[found->second].ranks == std::ssize(ranks),
                              "program: groups that look alike are equally "
                              "large in ",
                              world_.lanes[lane]);
      }
    }
  }

  Group group_of(size_t lane, const std::set<size_t>& classes,
                 size_t ranks) const {
    Group group;
    group.name = world_.lanes[lane];
    group.classes = {classes.begin(), classes.end()};
    group.ranks = static_cast<int64_t>(ranks);
    for (size_t each : classes) {
      group.across_stages |=
          followers_[each].of->stage != followers_[*classes.begin()].of->stage;
    }
    return group;
  }

  // Moves a class on by one instruction; false where it waits.
  bool advance(Follower& follower) {
    const Instruction& each = follower.of->program[follower.next];
    Timing& timing = follower.times.at[follower.next];
    const bool enters = !std::exchange(follower.entered, true);
    if (enters) timing.begin = follower.now;
    if (!carry_out(follower, each, enters)) return false;
    timing.end = follower.now;
    if (is_compute(each.op) || each.op == Op::kLoss) {
      if (follower.times.busy.begin < 0) {
        follower.times.busy.begin = timing.begin;
      }
      follower.times.busy.end = timing.end;
    }
    if (each.op == Op::kNextVersion) note_end(follower);
    ++follower.next;
    follower.entered = false;
    follower.part = 0;
    return true;
  }

  static void note_end(Follower& follower) {
    RankTimes& times = follower.times;
    times.step_ends.push_back({.time = follower.now,
                               .work = times.work,
                               .bubble = times.bubble,
                               .exposed = times.exposed,
                               .files = times.files});
  }

  bool carry_out(Follower& follower, const Instruction& each, bool enters) {
    if (is_fetch(each.op) || is_release(each.op)) {
      if (enters) use_files(follower, each);
    } else if (enters && each.phase != Phase::kAwait) {
      work(follower, each);
    }
    if (is_message(each.op)) return message(follower, each, enters);
    if (each.phase == Phase::kAwait) return await_all(follower, each);
    return collectives(follower, each) &&
           (each.phase == Phase::kBegin || await_all(follower, each));
  }

  void work(Follower& follower, const Instruction& each) {
    const double time =
        costs_.work ? costs_.work(follower.times.rank, each) : 0;
    follower.times.work += time;
    follower.now += time;
  }

  // A helper does them in their order; a fetch is awaited, a release is not.
  void use_files(Follower& follower, const Instruction& each) {
    if (each.phase == Phase::kAwait) return;
    const double time =
        costs_.work ? costs_.work(follower.times.rank, each) : 0;
    double& free = follower.files_free;
    free = std::max(free, follower.now) + time;
    if (is_fetch(each.op)) {
      pending(follower, each).push_back({.end = free});
    }
  }

  // Begins them one after the other; what is no communication by itself waits
  // for each.
  bool collectives(Follower& follower, const Instruction& each) {
    const auto& transfers = detail::transfers_of(*follower.of, each);
    auto& open = pending(follower, each);
    const bool is_one = is_communication(each.op);
    while (follower.part < transfers.size()) {
      if (is_one || open.empty()) {
        open.push_back(begin(follower, each, transfers[follower.part]));
      }
      if (!is_one && !await_all(follower, each)) return false;
      ++follower.part;
    }
    return true;
  }

  Pending begin(Follower& follower, const Instruction& each,
                const Transfer& transfer) {
    const int64_t id = follower.group_of.at(transfer.lane);
    Group& group = groups_[id];
    const auto index = static_cast<size_t>(follower.begun[transfer.lane]++);
    if (index == group.all.size()) group.all.emplace_back();
    Group::Collective& here = group.all[index];
    here.begin = std::max(here.begin, follower.now);
    if (++here.begun == group.classes.size()) {
      const double free = index > 0 ? group.all[index - 1].end : 0;
      here.end =
          std::max(here.begin, free) + time_of(each, transfer, group.ranks);
      for (size_t one : group.classes) wake(one);
    }
    return {.group = id, .index = index};
  }

  double time_of(const Instruction& each, const Transfer& transfer,
                 int64_t ranks) const {
    return program::time_of(
        transfer.verb, ranks,
        static_cast<double>(detail::bytes_of(each, transfer, ranks)),
        link_of(transfer.lane));
  }

  Link link_of(int64_t lane) const {
    const auto known = static_cast<int64_t>(costs_.links.size());
    return lane >= 0 && lane < known ? costs_.links[lane] : Link{};
  }

  std::vector<Pending>& pending(Follower& follower,
                                const Instruction& of) const {
    return follower
        .pending[static_cast<size_t>(of.op) * (units_ + 1) + of.unit + 1];
  }

  bool await_all(Follower& follower, const Instruction& each) {
    auto& open = pending(follower, each);
    for (Pending& one : open) {
      if (one.group < 0) continue;
      one.end = groups_[one.group].all[one.index].end;
      if (one.end == kUnknown) return false;
    }
    for (const Pending& one : open) {
      const Cause cause = one.group < 0                      ? Cause::kFiles
                          : groups_[one.group].across_stages ? Cause::kBubble
                                                             : Cause::kExposed;
      wait_until(follower, one.end, cause);
    }
    open.clear();
    return true;
  }

  static void wait_until(Follower& follower, double end, Cause cause) {
    if (end <= follower.now) return;
    double& waited = cause == Cause::kBubble    ? follower.times.bubble
                     : cause == Cause::kExposed ? follower.times.exposed
                                                : follower.times.files;
    waited += end - follower.now;
    follower.now = end;
  }

  bool message(Follower& follower, const Instruction& each, bool enters) {
    const Ends ends = ends_of(each, follower.of->stage, follower.of->stages,
                              follower.of->placement);
    if (ends.sends) return send(follower, each, ends, enters);
    if (each.phase == Phase::kBegin) return true;
    Letter& letter = follower.letters[slot_of(each, ends.activations)];
    if (letter.arrives == kUnknown) return false;
    TORCH_INTERNAL_ASSERT(!std::exchange(letter.received, true),
                          "program: ", place(follower),
                          ": it was received before");
    wait_until(follower, letter.arrives, Cause::kBubble);
    return true;
  }

  bool send(Follower& follower, const Instruction& each, const Ends& ends,
            bool enters) {
    double& over = follower.send_over[slot_of(each, ends.activations)];
    if (enters && each.phase != Phase::kAwait) {
      TORCH_INTERNAL_ASSERT(!follower.peers.empty(),
                            "program: ", place(follower),
                            ": there is no group of stages");
      const Link link = link_of(world_.pipeline);
      double& free = follower.link_free.at(ends.peer_stage);
      free = std::max(free, follower.now) +
             static_cast<double>(follower.of->message_elements *
                                 costs_.message_element_bytes) /
                 link.bytes_per_time;
      over = free;
      deliver(follower, each, ends, over + link.latency);
    }
    if (each.phase != Phase::kBegin) {
      wait_until(follower, over, Cause::kBubble);
    }
    return true;
  }

  void deliver(const Follower& from, const Instruction& each, const Ends& ends,
               double arrives) {
    const size_t peer = from.peers.at(ends.peer_stage);
    const Pipeline pipeline{.stages = from.of->stages,
                            .chunks = chunks_,
                            .placement = from.of->placement};
    Instruction received = each;
    received.chunk = pipeline.place_of(ends.receiver, each.chunk).chunk;
    TORCH_INTERNAL_ASSERT(received.chunk < chunks_, "program: ", place(from),
                          ": there is no chunk that receives it");
    Letter& letter =
        followers_[peer].letters[slot_of(received, ends.activations)];
    TORCH_INTERNAL_ASSERT(letter.arrives == kUnknown, "program: ", place(from),
                          ": it was sent before");
    letter.arrives = arrives;
    wake(peer);
  }

  size_t slot_of(const Instruction& message, bool activations) const {
    return (message.chunk * 2 + (activations ? 1 : 0)) * microbatches_ +
           message.microbatch;
  }

  void wake(size_t one) {
    if (std::exchange(followers_[one].queued, true)) return;
    ready_.push_back(one);
  }

  std::string place(const Follower& follower) const {
    return c10::str("rank ", follower.times.rank, " at ", follower.next, ": ",
                    describe(follower.of->program.at(follower.next)));
  }

  void expect_end(const Follower& follower) const {
    if (follower.next == follower.of->program.size()) return;
    const Instruction& each = follower.of->program[follower.next];
    if (is_message(each.op)) {
      const Ends ends = ends_of(each, follower.of->stage, follower.of->stages,
                                follower.of->placement);
      const Follower& peer = followers_[follower.peers.at(ends.peer_stage)];
      TORCH_INTERNAL_ASSERT(false, "program: ", place(follower),
                            ": waits for ever for rank ", peer.times.rank,
                            ", which ", state_of(peer));
    }
    for (const Group& group : groups_) {
      for (size_t one : group.classes) {
        if (&followers_[one] == &follower) expect_begun(follower, group);
      }
    }
    TORCH_INTERNAL_ASSERT(false, "program: ", place(follower),
                          ": waits for ever");
  }

  // Names who has not begun what this group is waiting for.
  void expect_begun(const Follower& follower, const Group& group) const {
    const auto open =
        std::ranges::find(group.all, kUnknown, &Group::Collective::end);
    if (open == group.all.end()) return;
    const auto lane = std::ranges::find(world_.lanes, group.name);
    const auto at = lane - world_.lanes.begin();
    for (size_t one : group.classes) {
      const Follower& other = followers_[one];
      TORCH_INTERNAL_ASSERT(other.begun[at] > open - group.all.begin(),
                            "program: ", place(follower),
                            ": waits for ever for rank ", other.times.rank,
                            " in group ", group.name, ", which ",
                            state_of(other));
    }
  }

  std::string state_of(const Follower& other) const {
    if (other.next == other.of->program.size()) return "has ended";
    return c10::str("waits at ", other.next, ": ",
                    describe(other.of->program[other.next]));
  }

  void expect_received(const Follower& follower) const {
    for (size_t slot = 0; slot < follower.letters.size(); ++slot) {
      const Letter& letter = follower.letters[slot];
      const auto line = static_cast<int64_t>(slot) / microbatches_;
      TORCH_INTERNAL_ASSERT(
          letter.arrives == kUnknown || letter.received, "program: rank ",
          follower.times.rank, " never receives the ",
          line % 2 == 1 ? "activations" : "gradients", " of micro-batch ",
          static_cast<int64_t>(slot) % microbatches_,
          " that were sent to its "
          "chunk ",
          line / 2);
    }
  }

  Simulation finish() {
    Simulation all;
    all.class_of = classes_.of_rank;
    for (auto& each : followers_) all.step = std::max(all.step, each.now);
    for (auto& each : followers_) {
      each.times.bubble += all.step - each.now;
      all.classes.push_back(std::move(each.times));
    }
    return all;
  }

  const World& world_;
  const Costs& costs_;
  const detail::Classes classes_;
  int64_t microbatches_ = 0, chunks_ = 1, units_ = 0;
  std::vector<Follower> followers_;  // by class
  std::vector<Group> groups_;
  std::vector<size_t> ready_;
};

}  // namespace

double Simulation::bubble() const {
  double sum = 0, ranks = 0;
  for (const auto& each : classes) {
    sum += each.bubble * static_cast<double>(each.num_ranks);
    ranks += static_cast<double>(each.num_ranks);
  }
  return step > 0 ? sum / (ranks * step) : 0;
}

Simulation simulate(const World& world, const Costs& costs) {
  return Simulator(world, costs).run();
}

std::vector<Level> levels_of(const RankTimes& times, const Memory& memory) {
  TORCH_INTERNAL_ASSERT(times.at.size() == memory.during.size(),
                        "program: times and memory of other programs");
  std::vector<Level> levels;
  for (size_t i = 0; i < times.at.size(); ++i) {
    levels.push_back({times.at[i].begin, memory.during[i]});
    levels.push_back({times.at[i].end, memory.behind[i]});
  }
  return levels;
}

}  // namespace tessera::program
