// The rules of checker.h, in four sets: what micro-batches do, where parameters
// are, what becomes of gradients, what is fetched from files. Each set sees
// every instruction.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/program/checker.h"

namespace tessera::program::detail {

// Something that is begun and awaited, or done at once.
enum class Progress { kNone, kUnderWay, kDone };

class Rules {
 public:
  Rules(const Units& units, Purpose purpose)
      : units_(units), purpose_(purpose), owners_(units.owners()) {}
  virtual ~Rules() = default;
  Rules(const Rules&) = delete;
  Rules& operator=(const Rules&) = delete;

  void see(const Instruction& instruction, size_t place) {
    seen_ = &instruction;
    place_ = place;
    take(instruction);
  }
  void end() {
    seen_ = nullptr;
    finish();
  }

 protected:
  virtual void take(const Instruction& instruction) = 0;
  virtual void finish() = 0;

  template <typename... Args>
  void require(bool holds, const Args&... rule) const {
    TORCH_INTERNAL_ASSERT(holds, "program: ", place(), ": ", c10::str(rule...));
  }
  // "at 12: Forward 3 unit 1".
  std::string place() const {
    return seen_ ? c10::str("at ", place_, ": ", describe(*seen_))
                 : "at the end";
  }
  bool names_units() const { return !units_.chunks.empty(); }
  const Unit& unit_at(int64_t unit) const {
    require(unit >= 0 && unit < static_cast<int64_t>(units_.all.size()),
            "there is no such unit");
    return units_.all[unit];
  }
  // Of parameters that lie here.
  void require_owner(int64_t unit) const {
    unit_at(unit);
    require(std::ranges::binary_search(owners_, unit),
            "no unit that runs here reads its parameters");
  }
  // The units whose parameters a compute instruction reads.
  const std::vector<int64_t>& reads(const Instruction& instruction) const {
    return unit_at(instruction.unit).reads;
  }
  static bool begins(const Instruction& each) {
    return each.phase != Phase::kAwait;
  }
  static bool ends(const Instruction& each) {
    return each.phase != Phase::kBegin;
  }

  // `again`: the rule where it was begun before.
  void advance(const Instruction& instruction, Progress& progress,
               const char* again) const {
    if (begins(instruction)) {
      require(progress == Progress::kNone, again);
      progress = Progress::kUnderWay;
    }
    if (ends(instruction)) {
      require(progress == Progress::kUnderWay, "it was not begun");
      progress = Progress::kDone;
    }
  }

  const Units& units_;
  const Purpose purpose_;
  const std::vector<int64_t> owners_;  // whose parameters lie here, ascending

 private:
  const Instruction* seen_ = nullptr;
  size_t place_ = 0;
};

class MicrobatchRules : public Rules {
 public:
  using Rules::Rules;
  int64_t num_microbatches() const;
  int64_t peak_alive() const { return peak_alive_; }

 protected:
  void take(const Instruction& instruction) override;
  void finish() override;

 private:
  // Of a micro-batch in a chunk.
  struct State {
    Progress inputs = Progress::kNone, gradients = Progress::kNone;
    Progress sent_up = Progress::kNone, sent_down = Progress::kNone;
    bool targets = false, loss = false, loaded = false, received = false;
    std::optional<int64_t> version = {};  // of the parameters, all the way
    bool documents = false;               // where they begin is known
    int64_t forward = 0, input = 0;       // units that went
    std::vector<int64_t> weight = {};  // units, in the order in which they went
    std::set<int64_t> whole = {};      // units whose activations are there
    int64_t replayed = -1;  // the unit whose output waits for the one behind it
  };
  int64_t length_of(int64_t chunk) const;
  int64_t unit_of(const Instruction& instruction, int64_t place) const;
  void message(const Instruction& instruction, State& state);
  void hand_over(const Instruction& instruction, State& state);
  void forward(const Instruction& instruction, State& state);
  void again(const Instruction& instruction, State& state);
  void backward(const Instruction& instruction, State& state);
  void require_whole(const Instruction& instruction, const State& state) const;
  void input_part(const Instruction& instruction, State& state);
  void weight_part(const Instruction& instruction, State& state);

  std::map<std::pair<int64_t, int64_t>, State> states_;  // micro-batch, chunk
  Progress next_batch_ = Progress::kNone;                // that is shared
  std::set<int64_t> complete_;                           // versions
  int64_t alive_ = 0, peak_alive_ = 0;
};

class ParameterRules : public Rules {
 public:
  ParameterRules(const Units& units, Purpose purpose);
  int64_t gathers() const { return gathers_; }
  int64_t peak_gathered() const { return peak_gathered_; }

 protected:
  void take(const Instruction& instruction) override;
  void finish() override;

 private:
  void read(const Instruction& instruction);
  void gather(const Instruction& instruction);
  void update(const Instruction& instruction);
  void end_step(int64_t version);
  // Its parameters of this version are gathered.
  Progress& whole(int64_t unit, int64_t version);
  void require_alive(int64_t unit, int64_t version);
  std::map<std::pair<int64_t, int64_t>, Progress> whole_;  // by unit, version
  std::map<int64_t, int64_t> updates_;  // by unit, or of all: how many
  std::set<int64_t> kept_;              // units whose update may follow
  int64_t ended_ = 0;                   // steps
  bool replicated_ = false, computed_ = false;
  int64_t gathers_ = 0, now_gathered_ = 0, peak_gathered_ = 0;
};

class GradientRules : public Rules {
 public:
  GradientRules(const Units& units, Purpose purpose);

 protected:
  void take(const Instruction& instruction) override;
  void finish() override;

 private:
  struct Owner {
    bool allocated = false;
    int64_t adds = 0;        // backwards that added since the last reduction
    int64_t reductions = 0;  // begun
    Progress reduction = Progress::kNone;  // the last one
    Progress sum = Progress::kNone;
    Progress updates = Progress::kNone;           // gathered
    std::map<int64_t, int64_t> adds_of = {};      // by micro-batch
    std::map<int64_t, int64_t> forwards_of = {};  // which each is due after
    std::set<int64_t> added = {};  // micro-batches since the last reduction
    int64_t joined = 0;  // micro-batches that were reduced with another
  };
  // The gradients of one batch.
  struct Step {
    std::map<int64_t, Owner> owners = {};  // by unit
    bool zeroed = false, added = false, gathered_replicas = false;
    bool normed = false, clipped = false, stepped = false;
    Progress sum_norm = Progress::kNone;
  };
  void take(const Instruction& instruction, Step& step);
  void zero(int64_t version, Step& step);
  void require_room(const Instruction& instruction, Step& step);
  void add(const Instruction& instruction, Step& step);
  void reduce(const Instruction& instruction, Step& step);
  void sum(const Instruction& instruction, Step& step);
  void norm(Step& step);
  void check_owner(int64_t id, const Owner& owner);
  void tail(const Instruction& instruction, Step& step);
  void update(const Instruction& instruction, Step& step);
  void end_step(int64_t version, const Step& step);

  std::map<int64_t, Step> steps_;  // by version
  int64_t ended_ = 0;              // of them
};

class FileRules : public Rules {
 public:
  using Rules::Rules;

 protected:
  void take(const Instruction& instruction) override;
  void finish() override;

 private:
  std::map<std::pair<Op, int64_t>, Progress> fetched_;  // by fetch and unit
  std::map<int64_t, bool> gathers_;  // units whose gather is under way
};

}  // namespace tessera::program::detail
