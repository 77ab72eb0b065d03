#include "tessera/program/schedules/file.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/mesh/axis.h"

namespace tessera::program::schedules {
namespace {

constexpr std::array<std::pair<char, Op>, 4> kLetters = {
    {{'F', Op::kForward},
     {'B', Op::kBackward},
     {'I', Op::kBackwardInput},
     {'W', Op::kBackwardWeight}}};
constexpr std::array<std::pair<const char*, Placement>, 3> kPlacements = {
    {{"round_robin", Placement::kRoundRobin},
     {"v", Placement::kV},
     {"mirrored", Placement::kMirrored}}};
constexpr int64_t kMostTasks = int64_t{1} << 24;

std::string text_of(const Task& task) {
  std::string text;
  for (const auto& [letter, op] : kLetters) {
    if (op == task.op) text = letter;
  }
  text += std::to_string(task.microbatch);
  if (task.chunk > 0) text += "." + std::to_string(task.chunk);
  return text;
}

class Reader {
 public:
  explicit Reader(std::string path) : path_(std::move(path)) {}

  Schedule read() {
    const std::string whole = read_file(path_);
    TS_CHECK_CONFIG(whole.find('\0') == std::string::npos, path_,
                    " has bytes of 0: it is no text.");
    std::istringstream lines(whole);
    std::string text;
    while (std::getline(lines, text)) {
      ++line_;
      text = text.substr(0, text.find('#'));
      if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
      if (shape_.stages == 0) {
        read_shape(text);
      } else {
        read_stage(text);
      }
    }
    require(shape_.stages > 0, "there is no line \"stages P, chunks V, ",
            "microbatches M\"");
    require(stages_.size() == static_cast<size_t>(shape_.stages),
            "there are lines of ", stages_.size(), " stages, not ",
            shape_.stages);
    for (size_t stage = 0; stage < stages_.size(); ++stage) check_tasks(stage);
    if (placement_ == Placement::kMirrored) check_replicas();
    check_order();
    return schedule();
  }

 private:
  struct Stage {
    int64_t line = 0;
    std::vector<Turn> turns;
  };

  template <typename... Args>
  void require(bool holds, const Args&... rule) const {
    TS_CHECK_CONFIG(holds, path_, ":", line_, ": ", c10::str(rule...), ".");
  }

  int64_t number(const std::string& text, const std::string& what) const {
    int64_t value = -1;
    const char* const end = text.data() + text.size();
    const auto result = std::from_chars(text.data(), end, value);
    require(result.ec == std::errc() && result.ptr == end && value >= 0, what,
            " is \"", text, "\", which is no number");
    return value;
  }

  void read_shape(std::string text) {
    std::ranges::replace(text, ',', ' ');
    std::istringstream words(text);
    shape_ = {.stages = 0, .chunks = 0, .num_microbatches = 0};
    std::set<std::string> said;
    for (std::string key, value; words >> key;) {
      require(static_cast<bool>(words >> value), key, " has no value");
      require(said.insert(key).second, key, " is said twice");
      if (key == "placement") {
        const auto* const found = std::ranges::find(
            kPlacements, value,
            [](const auto& each) { return std::string(each.first); });
        require(found != kPlacements.end(), "placement is ", value,
                ", not round_robin, v or mirrored");
        placement_ = found->second;
        continue;
      }
      require(key != "ranks" && key != "replicas", "\"", key,
              "\" is not a schedule's. ", mesh::kStagesAreAlike);
      const bool is_known =
          key == "stages" || key == "chunks" || key == "microbatches";
      require(is_known, "\"", key, "\" is not stages, chunks, microbatches or ",
              "placement");
      (key == "stages"   ? shape_.stages
       : key == "chunks" ? shape_.chunks
                         : shape_.num_microbatches) = number(value, key);
    }
    require(
        shape_.stages > 0 && shape_.chunks > 0 && shape_.num_microbatches > 0,
        "stages, chunks and microbatches are 1 or more");
    require(shape_.stages <= kMostTasks && shape_.chunks <= kMostTasks &&
                shape_.num_microbatches <=
                    kMostTasks / shape_.stages / shape_.chunks,
            "more than ", kMostTasks, " micro-batches of chunks");
    require(placement_ != Placement::kMirrored ||
                (shape_.chunks == 2 && shape_.stages % 2 == 0),
            "mirrored stages have 2 chunks, and are an even number");
  }

  void read_stage(const std::string& text) {
    require(stages_.size() < static_cast<size_t>(shape_.stages),
            "a line more than there are stages (", shape_.stages, "). ",
            mesh::kStagesAreAlike);
    Stage& stage = stages_.emplace_back();
    stage.line = line_;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
      Turn& turn = stage.turns.emplace_back();
      std::istringstream tasks(word);
      for (std::string task; std::getline(tasks, task, '+');) {
        turn.push_back(task_of(task));
      }
    }
  }

  Task task_of(const std::string& text) const {
    const auto* const found = std::ranges::find(
        kLetters, text.empty() ? ' ' : text[0], &std::pair<char, Op>::first);
    require(found != kLetters.end(), "\"", text,
            "\" is no task: F, B, I or W and the number of a micro-batch");
    const size_t dot = text.find('.');
    const std::string chunk =
        dot == std::string::npos ? "0" : text.substr(dot + 1);
    const Task task{.op = found->second,
                    .microbatch = number(text.substr(1, dot - 1),
                                         "the micro-batch of " + text),
                    .chunk = number(chunk, "the chunk of " + text)};
    require(
        task.microbatch < shape_.num_microbatches && task.chunk < shape_.chunks,
        text, ": there are ", shape_.num_microbatches, " micro-batches and ",
        shape_.chunks, " chunks, counted from 0");
    return task;
  }

  // Each micro-batch of each chunk forward once, and then backward.
  void check_tasks(size_t stage) {
    line_ = stages_[stage].line;
    std::map<std::pair<int64_t, int64_t>, std::set<Op>> done;
    for (const Turn& turn : stages_[stage].turns) {
      for (const Task& task : turn) {
        auto& ops = done[{task.chunk, task.microbatch}];
        const std::string text = text_of(task);
        require(ops.insert(task.op).second, text, " comes twice");
        if (task.op == Op::kForward) continue;
        const bool in_parts = task.op != Op::kBackward;
        require(ops.contains(Op::kForward), text, " comes before its forward");
        require(!in_parts || !ops.contains(Op::kBackward), text,
                " comes behind a whole backward");
        require(in_parts || ops.size() == 2, text,
                " comes behind a part of itself");
        require(
            task.op != Op::kBackwardWeight || ops.contains(Op::kBackwardInput),
            text, " comes before I", text.substr(1));
      }
    }
    for (int64_t m = 0; m < shape_.num_microbatches; ++m) {
      int64_t through = 0;
      for (int64_t chunk = 0; chunk < shape_.chunks; ++chunk) {
        const auto found = done.find({chunk, m});
        if (found == done.end()) continue;
        ++through;
        require(found->second.contains(Op::kBackward) ||
                    found->second.contains(Op::kBackwardWeight),
                "micro-batch ", m, " never goes backward through chunk ",
                chunk);
        if (placement_ == Placement::kMirrored) check_replica(m, chunk);
      }
      require(
          through == (placement_ == Placement::kMirrored ? 1 : shape_.chunks),
          "micro-batch ", m, " goes through ", through, " chunks of ",
          shape_.chunks);
    }
  }

  void check_replica(int64_t microbatch, int64_t chunk) {
    const auto [found, is_new] = replica_of_.emplace(microbatch, chunk);
    require(found->second == chunk, "micro-batch ", microbatch,
            " goes through chunk ", chunk, ", elsewhere through chunk ",
            found->second);
  }

  // Each has gradients, of which their sum is made.
  void check_replicas() const {
    std::set<int64_t> used;
    for (const auto& [microbatch, chunk] : replica_of_) used.insert(chunk);
    require(used.size() == 2, "all micro-batches go through chunk ",
            *used.begin(), ", and none through its mirror");
  }

  // Whether what a task needs was made: of its own stage's forward, a W of its
  // I, or of the stage before it or behind.
  void check_order() {
    const Pipeline pipeline{shape_.stages, shape_.chunks, placement_};
    using Made = std::tuple<bool, int64_t, int64_t, int64_t>;
    std::set<Made> made;
    std::vector<std::vector<Task>> tasks(stages_.size());
    for (size_t stage = 0; stage < stages_.size(); ++stage) {
      for (const Turn& turn : stages_[stage].turns) {
        tasks[stage].insert(tasks[stage].end(), turn.begin(), turn.end());
      }
    }
    const auto is_ready = [&](const Task& task, int64_t stage) {
      if (task.op == Op::kBackwardWeight) return true;
      const bool forward = task.op == Op::kForward;
      const Place here{stage, task.chunk};
      const auto from = forward ? pipeline.before(here) : pipeline.behind(here);
      return !from || made.contains(
                          {forward, task.microbatch, from->stage, from->chunk});
    };
    std::vector<size_t> next(stages_.size(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t stage = 0; stage < stages_.size(); ++stage) {
        const auto at = static_cast<int64_t>(stage);
        for (; next[stage] < tasks[stage].size(); ++next[stage]) {
          const Task& task = tasks[stage][next[stage]];
          if (!is_ready(task, at)) break;
          moved = true;
          if (task.op == Op::kBackwardWeight) continue;
          made.emplace(task.op == Op::kForward, task.microbatch, at,
                       task.chunk);
        }
      }
    }
    for (size_t stage = 0; stage < stages_.size(); ++stage) {
      if (next[stage] == tasks[stage].size()) continue;
      line_ = stages_[stage].line;
      require(
          false, "stage ", stage, ": ", text_of(tasks[stage][next[stage]]),
          " waits for ever for the stage that gives it its ",
          tasks[stage][next[stage]].op == Op::kForward ? "input" : "gradient");
    }
  }

  Schedule schedule() const {
    auto turns = std::make_shared<std::vector<std::vector<Turn>>>();
    for (const Stage& stage : stages_) turns->push_back(stage.turns);
    Schedule schedule;
    schedule.name = path_;
    schedule.turns = [turns](const Shape&, int64_t stage) {
      return turns->at(stage);
    };
    schedule.placement = placement_;
    schedule.chunked = shape_.chunks > 1;
    schedule.only = shape_;
    schedule.sends_wait = true;
    return schedule;
  }

  const std::string path_;
  int64_t line_ = 0;
  Shape shape_{.stages = 0};
  Placement placement_ = Placement::kRoundRobin;
  std::vector<Stage> stages_;
  std::map<int64_t, int64_t> replica_of_;  // of a micro-batch: its chunk
};

}  // namespace

bool names_file(const std::string& name) {
  return name.find('/') != std::string::npos || name.ends_with(".txt");
}

Schedule read_schedule(const std::string& path) { return Reader(path).read(); }

std::string written(const Schedule& schedule, const Shape& shape) {
  std::ostringstream text;
  text << "stages " << shape.stages << ", chunks " << shape.chunks
       << ", microbatches " << shape.num_microbatches;
  for (const auto& [name, placement] : kPlacements) {
    const bool is_usual = placement == Placement::kRoundRobin;
    if (placement == schedule.placement && !is_usual) {
      text << ", placement " << name;
    }
  }
  text << "\n";
  for (int64_t stage = 0; stage < shape.stages; ++stage) {
    const auto turns = schedule.turns(shape, stage);
    for (size_t i = 0; i < turns.size(); ++i) {
      text << (i == 0 ? "" : " ");
      for (size_t j = 0; j < turns[i].size(); ++j) {
        text << (j == 0 ? "" : "+") << text_of(turns[i][j]);
      }
    }
    text << "\n";
  }
  return text.str();
}

}  // namespace tessera::program::schedules
