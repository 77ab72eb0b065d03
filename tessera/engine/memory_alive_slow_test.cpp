// Bytes alive behind every instruction of a step, as facts have them, beside
// what the allocator counts on every rank.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <thread>

#include "tessera/engine/memory_plan.h"
#include "tessera/engine/rank_model.h"
#include "tessera/engine/step_programs.h"
#include "tessera/monitor/memory.h"
#include "tessera/program/memory.h"
#include "tests/support/memory_cases.h"

namespace tessera::engine {
namespace {

using program::Instruction;
// Tokens that route_evenly() sends to all experts alike.
data::Batch batch_of(int64_t count) {
  const at::Tensor ids = at::arange(count * kSeqLen).remainder(kVocab);
  return {ids.view({count, kSeqLen}), ids.view({count, kSeqLen}).clone()};
}

// With a document in each sample, which is what facts say of documents.
data::Batch batch_for(const RunConfig& config, int64_t count) {
  data::Batch batch = batch_of(count);
  if (config.data.documents_apart()) {
    batch.document_starts = at::zeros({count, kSeqLen}, at::kLong);
  }
  return batch;
}

// Facts take experts to get as many rows each. Here the token t asks for
// experts t k, t k + 1 ...: its embedding says which, blocks add nothing to it.
void route_evenly(const RunConfig& config, RankModel& model) {
  const int64_t experts = config.model.moe.experts;
  const int64_t top_k = config.model.moe.top_k;
  if (experts == 0) return;
  const at::NoGradGuard no_grad;
  const auto& composed = model.composed();
  const auto set = [&](const parallel::data::LocalParameter& of, int64_t row,
                       int64_t column) {
    const mesh::Box box = of.layout.local_box(composed.mesh, composed.coord);
    const int64_t begin = box.offset[0];
    if (row < begin || row >= begin + of.shard.size(0)) return;
    at::Tensor element = of.shard[row - begin][column];
    element.fill_(1.0);
  };
  for (const auto& each : composed.parameters->parameters()) {
    at::Tensor shard = each.shard;
    const bool is_gate = each.name.ends_with("moe.gate.weight");
    const bool is_embedding = each.name == "embed.tokens.weight";
    const bool adds = each.name.ends_with("attention.o.weight") ||
                      each.name.ends_with("down.weight");
    // What is ahead of a token is not seen.
    const bool leads_ahead = each.name.ends_with("mtp.proj.weight");
    if (is_gate || is_embedding || adds || leads_ahead) shard.zero_();
    const int64_t width = config.model.hidden;
    for (int64_t i = 0; leads_ahead && i < width; ++i) set(each, i, width + i);
    for (int64_t e = 0; is_gate && e < experts; ++e) set(each, e, e);
    for (int64_t t = 0; is_embedding && t < kVocab; ++t) {
      for (int64_t j = 0; j < top_k; ++j) {
        set(each, t, (t * top_k + j) % experts);
      }
    }
  }
}

struct Error {
  double alive = 0, during = 0;
  std::string alive_at, during_at;
};

// What is held beyond model states: said and found, behind and during each
// instruction of a rank's step, or of its evaluation.
class Watch {
 public:
  Watch(const RunConfig& config, const RankModel& model, int64_t rank,
        program::Purpose purpose)
      : composed_(model.composed()),
        program_(lowered_program(config, composed_.mesh, composed_.model,
                                 composed_.coord[mesh::Axis::kPp], purpose)),
        said_(program::memory_of(
            program_, composed_.model.units_of(composed_.mesh, rank, purpose),
            facts_of(config, composed_.mesh, composed_.mesh.coord_of(rank),
                     purpose))) {
    for (const auto& step : steps_of(program_, accumulation(config))) {
      run_.insert(run_.end(), step.begin(), step.end());
    }
    for (const auto kind : {MemoryKind::kParameters, MemoryKind::kGradients,
                            MemoryKind::kOptimizer}) {
      states_ += monitor::tensor_bytes(kind).now;
    }
    monitor::reset_tensor_peak();
  }

  // The batch of an evaluation is its caller's from the beginning. Where no
  // axis cuts it, what is loaded is that same one.
  void count_batch(const data::Batch& batch) {
    const auto ids =
        static_cast<int64_t>(batch.inputs.nbytes() + batch.targets.nbytes());
    // Which no axis cuts.
    const auto starts = static_cast<int64_t>(
        batch.document_starts.defined() ? batch.document_starts.nbytes() : 0);
    const bool cut = composed_.mesh.degree(mesh::Axis::kCp) > 1;
    bool loaded = false;
    for (size_t i = 0; i < program_.size(); ++i) {
      loaded |= program_[i].op == program::Op::kLoadInputs ||
                program_[i].op == program::Op::kLoadTargets ||
                program_[i].op == program::Op::kLoadDocuments;
      if (loaded && !cut) break;
      const int64_t bytes = ids + (loaded ? 0 : starts);
      said_.behind[i] += bytes;
      said_.during[i] += bytes;
    }
  }

  program::Observer observer() {
    return [this](const Instruction& instruction, double, double) {
      const size_t i = found_.size();
      EXPECT_EQ(instruction, run_.at(i));
      during_.push_back(monitor::tensor_bytes().peak - states_);
      // Before the first there was what the step before had left.
      if (i == 0) during_[0] = now();
      found_.push_back(instruction.phase == program::Phase::kAwait
                           ? settled(said_.behind.at(i))
                           : now());
      monitor::reset_tensor_peak();
    };
  }

  // Relative to what is found, where that is more than a twentieth of the most
  // that is found; to that twentieth elsewhere.
  Error error() const {
    const int64_t most = *std::ranges::max_element(found_);
    const auto error_of = [&](int64_t said, int64_t found) {
      const int64_t whole = std::max(found, most / 20);
      return std::abs(static_cast<double>(said - found)) /
             static_cast<double>(whole);
    };
    Error error;
    const auto note = [&](double& worst, std::string& at, size_t i,
                          int64_t said, int64_t found) {
      if (error_of(said, found) <= worst) return;
      worst = error_of(said, found);
      at = c10::str("instruction ", i, ", ", describe(program_[i]), ": said ",
                    said, ", found ", found, ", most ", most);
    };
    for (size_t i = 0; i < found_.size(); ++i) {
      note(error.alive, error.alive_at, i, said_.behind[i], found_[i]);
      note(error.during, error.during_at, i, said_.during[i], during_[i]);
    }
    return error;
  }

 private:
  // A group's thread lets go of a collective's tensors a moment after those who
  // await it go on.
  int64_t settled(int64_t expected) const {
    for (int tries = 0; tries < 20 && now() > expected + now() / 100; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return now();
  }
  int64_t now() const { return monitor::tensor_bytes().now - states_; }

  const parallel::Composed& composed_;
  const program::Program program_;
  program::Program run_;  // the same, as each step counts micro-batches
  program::Memory said_;
  int64_t states_ = 0;
  std::vector<int64_t> found_, during_;
};

// oneDNN takes scratch inside of products, which facts do not count: what is
// alive inside of an instruction is compared without it.
class MemoryAlive : public ::testing::TestWithParam<MemoryCase> {
 protected:
  void SetUp() override { at::globalContext().setUserEnabledMkldnn(false); }
  void TearDown() override { at::globalContext().setUserEnabledMkldnn(true); }
  void expect_told(program::Purpose purpose) const;
};

void MemoryAlive::expect_told(program::Purpose purpose) const {
  const RunConfig config = memory_run(GetParam());
  const bool trains = purpose == program::Purpose::kTraining;
  monitor::count_tensor_bytes();
  std::mutex mutex;
  Error worst;
  comm::run_threads(
      implied_world_size(config), "shm", [&](comm::Communicator& ranks) {
        const monitor::RankMemory memory;
        RankModel model(config, ranks, purpose);
        route_evenly(config, model);
        const data::Batch batch =
            trains ? data::Batch() : batch_for(config, config.batch.micro);
        const auto run = [&](const program::Observer& observer) {
          if (!trains) {
            model.evaluate(batch, observer);
            return;
          }
          const auto input = step_input(config, /*step=*/0, /*lr=*/0,
                                        [&](int64_t, int64_t, int64_t count) {
                                          return batch_for(config, count);
                                        });
          for (int64_t i = model.goes_on() ? program::schedules::kStepsTogether
                                           : 1;
               i > 0; --i) {
            std::optional<StepInput> next;
            if (i > 1) next = input;
            model.step(input, observer, std::move(next));
          }
        };
        run(nullptr);  // opens what is opened on first use
        Watch watch(config, model, ranks.rank(), purpose);
        if (!trains) watch.count_batch(batch);
        run(watch.observer());
        const Error error = watch.error();
        const std::scoped_lock lock(mutex);
        if (error.alive > worst.alive) {
          worst.alive = error.alive;
          worst.alive_at = error.alive_at;
        }
        if (error.during > worst.during) {
          worst.during = error.during;
          worst.during_at = error.during_at;
        }
      });
  const double bound = config.whole_matrices ? 0.01 : 0.05;
  EXPECT_LE(worst.alive, bound) << worst.alive_at;
  EXPECT_LE(worst.during, bound) << worst.during_at;
  std::printf("%-20s alive %5.2f%%  during %5.2f%%\n", GetParam().name,
              100 * worst.alive, 100 * worst.during);
}

TEST_P(MemoryAlive, IsWhatTheAllocatorCounts) {
  expect_told(program::Purpose::kTraining);
}

TEST_P(MemoryAlive, InAnEvaluationToo) {
  expect_told(program::Purpose::kEvaluation);
}

INSTANTIATE_TEST_SUITE_P(Meshes, MemoryAlive, ::testing::ValuesIn(cases()),
                         [](const auto& each) {
                           std::string name = each.param.name;
                           std::ranges::replace(name, ' ', '_');
                           return name;
                         });

}  // namespace
}  // namespace tessera::engine
