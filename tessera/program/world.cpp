#include "tessera/program/world.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/core/sent_bytes.h"
#include "tessera/program/detail/classes.h"
#include "tessera/program/detail/transfers.h"

namespace tessera::program {
namespace {

// One message as its receiver names it.
struct Message {
  bool activations;
  int64_t sender, receiver;  // virtual stages
  int64_t microbatch;
  int64_t version;
  auto operator<=>(const Message&) const = default;
};

// What a rank does that others have to do with.
struct Act {
  size_t at = 0;  // of the instruction
  enum class Kind { kCollective, kMessage } kind = Kind::kCollective;
  bool begins = true, waits = true;
  int64_t lane = 0;
  int64_t index = 0;  // of a collective, on its lane
  Message message = {};
  bool sends = false;
  int64_t peer = 0;  // of a message: a stage
};

// One class of ranks on its way through its program.
struct Follower {
  const RankProgram* of = nullptr;
  int64_t rank = 0;
  std::vector<Act> acts;
  // By lane: the collectives in order, and where they are begun.
  std::vector<std::vector<Transfer>> transfers;
  std::vector<std::vector<size_t>> begun_at;
  size_t next = 0;
  bool posted = false;                          // the next act has begun
  std::vector<int64_t> begun;                   // by lane
  std::set<std::pair<Message, bool>> messages;  // posted; true: sends
  std::map<std::pair<int64_t, bool>, std::vector<Message>> order;  // of a peer
};

class Check {
 public:
  explicit Check(const World& world)
      : world_(world), classes_(detail::sort_ranks(world)) {
    for (int64_t rank : classes_.first) followers_.push_back(follow(rank));
  }

  WorldProof run() {
    WorldProof proof;
    proof.classes = static_cast<int64_t>(followers_.size());
    for (const auto& each : followers_) {
      for (const auto& lane : each.transfers) proof.collectives += lane.size();
    }
    compare_collectives();
    while (advance_all()) {
    }
    for (const auto& each : followers_) expect_end(each);
    compare_messages();
    for (const auto& each : followers_) proof.messages += each.messages.size();
    return proof;
  }

 private:
  std::string place(const Follower& follower, size_t at) const {
    return c10::str("rank ", follower.rank, " at ", at, ": ",
                    describe(follower.of->program.at(at)));
  }
  std::string describe_transfer(const Transfer& transfer) const {
    return c10::str(transfer.verb, " of ", transfer.elements, " ",
                    transfer.dtype);
  }

  Follower follow(int64_t rank) const {
    Follower follower{.of = world_.programs[rank], .rank = rank};
    follower.transfers.resize(world_.lanes.size());
    follower.begun_at.resize(world_.lanes.size());
    follower.begun.assign(world_.lanes.size(), 0);
    // Collectives under way, by their instruction.
    std::map<std::tuple<Op, int64_t>, std::vector<Act>> open;
    const Program& program = follower.of->program;
    for (size_t at = 0; at < program.size(); ++at) {
      const Instruction& each = program[at];
      if (is_message(each.op)) {
        follower.acts.push_back(message_act(follower, at));
        continue;
      }
      auto& under_way = open[{each.op, each.unit}];
      if (each.phase == Phase::kAwait) {
        for (Act& act : under_way) {
          act.at = at;
          follower.acts.push_back(act);
        }
        under_way.clear();
        continue;
      }
      for (const Transfer& transfer :
           detail::transfers_of(*follower.of, each)) {
        auto& lane = follower.transfers.at(transfer.lane);
        Act act{.at = at, .lane = transfer.lane};
        act.index = static_cast<int64_t>(lane.size());
        lane.push_back(transfer);
        follower.begun_at[transfer.lane].push_back(at);
        act.waits = each.phase == Phase::kWhole;
        follower.acts.push_back(act);
        act.begins = false;
        act.waits = true;
        if (each.phase == Phase::kBegin) under_way.push_back(act);
      }
    }
    return follower;
  }

  Act message_act(const Follower& follower, size_t at) const {
    const Instruction& each = follower.of->program[at];
    const RankProgram& of = *follower.of;
    const Ends ends = ends_of(each, of.stage, of.stages, of.placement);
    return {.at = at,
            .kind = Act::Kind::kMessage,
            .begins = each.phase != Phase::kAwait,
            .waits = each.phase != Phase::kBegin,
            .message = {ends.activations, ends.sender, ends.receiver,
                        each.microbatch, each.version},
            .sends = ends.sends,
            .peer = ends.peer_stage};
  }

  Follower& at_rank(int64_t rank) { return followers_[classes_.of_rank[rank]]; }

  void compare_collectives() {
    for (const auto& mine : followers_) {
      for (size_t lane = 0; lane < world_.lanes.size(); ++lane) {
        const auto here = static_cast<int64_t>(lane);
        for (int64_t rank : world_.members(mine.rank, here)) {
          const Follower& other = at_rank(rank);
          if (&other != &mine) compare(mine, other, rank, lane);
        }
      }
    }
  }

  // In an all_to_all each rank has its own share.
  static bool agree(const Transfer& one, const Transfer& other) {
    return one.verb == other.verb && one.dtype == other.dtype &&
           (one.elements == other.elements || one.verb == "all_to_all");
  }

  void compare(const Follower& mine, const Follower& other, int64_t rank,
               size_t lane) const {
    const auto& a = mine.transfers[lane];
    const auto& b = other.transfers[lane];
    for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
      if (i < a.size() && i < b.size() && agree(a[i], b[i])) continue;
      const auto what = [&](const Follower& of, const auto& list) {
        return i < list.size()
                   ? c10::str("begins ", describe_transfer(list[i]), " (",
                              describe(of.of->program[of.begun_at[lane][i]]),
                              ", instruction ", of.begun_at[lane][i], ")")
                   : std::string("begins no further one");
      };
      TORCH_INTERNAL_ASSERT(false, "program: in group ", world_.lanes[lane],
                            ", collective ", i, ": rank ", mine.rank, " ",
                            what(mine, a), ", but rank ", rank, " ",
                            what(other, b));
    }
  }

  // Moves every class on as far as it gets; false where none moves.
  bool advance_all() {
    bool moved = false;
    for (auto& each : followers_) {
      while (each.next < each.acts.size() && advance(each)) moved = true;
    }
    return moved;
  }

  bool advance(Follower& follower) {
    const Act& act = follower.acts[follower.next];
    bool moved = false;
    if (act.begins && !follower.posted) {
      post(follower, act);
      follower.posted = moved = true;
    }
    if (act.waits && !is_done(follower, act)) return moved;
    ++follower.next;
    follower.posted = false;
    return true;
  }

  void post(Follower& follower, const Act& act) {
    if (act.kind == Act::Kind::kCollective) {
      ++follower.begun[act.lane];
      return;
    }
    follower.messages.emplace(act.message, act.sends);
    follower.order[{act.peer, act.sends}].push_back(act.message);
  }

  int64_t rank_of_peer(const Follower& follower, const Act& act) const {
    TORCH_INTERNAL_ASSERT(world_.pipeline >= 0, place(follower, act.at),
                          ": there is no group of stages");
    return world_.members(follower.rank, world_.pipeline).at(act.peer);
  }

  bool is_done(const Follower& follower, const Act& act) {
    if (act.kind == Act::Kind::kMessage) {
      return at_rank(rank_of_peer(follower, act))
          .messages.contains({act.message, !act.sends});
    }
    return std::ranges::all_of(
        members_of(follower, act.lane), [&](int64_t one) {
          return followers_[one].begun[act.lane] > act.index;
        });
  }

  // The classes in a class's group.
  const std::vector<int64_t>& members_of(const Follower& follower,
                                         int64_t lane) {
    auto& known = members_[{follower.rank, lane}];
    if (!known.empty()) return known;
    std::set<int64_t> classes;
    for (int64_t rank : world_.members(follower.rank, lane)) {
      classes.insert(classes_.of_rank[rank]);
    }
    known.assign(classes.begin(), classes.end());
    return known;
  }

  void expect_end(const Follower& follower) {
    if (follower.next == follower.acts.size()) return;
    const Act& act = follower.acts[follower.next];
    if (act.kind == Act::Kind::kMessage) {
      TORCH_INTERNAL_ASSERT(false, "program: ", place(follower, act.at),
                            ": waits for ever for rank ",
                            rank_of_peer(follower, act));
    }
    for (int64_t rank : world_.members(follower.rank, act.lane)) {
      TORCH_INTERNAL_ASSERT(at_rank(rank).begun[act.lane] > act.index,
                            "program: ", place(follower, act.at),
                            ": waits for ever for rank ", rank, " in group ",
                            world_.lanes[act.lane]);
    }
  }

  void compare_messages() {
    for (const auto& mine : followers_) {
      for (const auto& [channel, sent] : mine.order) {
        const auto [peer, sends] = channel;
        const int64_t rank =
            world_.members(mine.rank, world_.pipeline).at(peer);
        const Follower& other = at_rank(rank);
        const auto received = other.order.find({mine.of->stage, !sends});
        TORCH_INTERNAL_ASSERT(
            received != other.order.end() && received->second == sent,
            "program: rank ", mine.rank, (sends ? " sends" : " receives"),
            " in another order than rank ", rank,
            (sends ? " receives" : " sends"));
        TORCH_INTERNAL_ASSERT(
            mine.of->message_elements == other.of->message_elements,
            "program: messages of rank ", mine.rank, " have ",
            mine.of->message_elements, " elements, those of rank ", rank, " ",
            other.of->message_elements);
      }
    }
  }

  const World& world_;
  const detail::Classes classes_;
  std::vector<Follower> followers_;  // by class
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> members_;
};

}  // namespace

WorldProof check(const World& world) { return Check(world).run(); }

int64_t moved_bytes(const World& world, int64_t rank, const Program& program,
                    int64_t message_element_bytes) {
  const RankProgram& of = *world.programs.at(rank);
  std::vector<int64_t> sizes(world.lanes.size(), 0);  // of its groups
  const auto size_of = [&](int64_t lane) {
    int64_t& size = sizes.at(lane);
    if (size == 0) size = std::ssize(world.members(rank, lane));
    return size;
  };
  int64_t bytes = 0;
  for (const Instruction& each : program) {
    if (is_send(each.op) && each.phase != Phase::kAwait) {
      bytes += of.message_elements * message_element_bytes;
    }
    for (const Transfer& transfer : detail::transfers_of(of, each)) {
      bytes +=
          sent_bytes(transfer.verb,
                     detail::bytes_of(each, transfer, size_of(transfer.lane)));
    }
  }
  return bytes;
}

}  // namespace tessera::program
