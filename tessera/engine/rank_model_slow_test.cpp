#include "tessera/engine/rank_model.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "tessera/core/sent_bytes.h"
#include "tessera/engine/step_plan.h"
#include "tessera/monitor/memory.h"
#include "tests/support/experts.h"
#include "tests/support/small_run.h"

namespace tessera::engine {
namespace {

using testing::ExpertLayout;
using testing::kExpertLayouts;
using testing::run_of_experts;
using testing::small_run;

data::Batch zeros(int64_t count, int64_t length) {
  const at::Tensor ids = at::zeros({count, length}, at::kLong);
  return {ids, ids};
}

struct Measured {
  // Bytes a parameter of what lives between steps, by the allocator that counts
  // them.
  double parameters = 0, gradients = 0, optimizer = 0;
  double states() const { return parameters + gradients + optimizer; }
  // Of a step: bytes out of a rank, in units of the parameters, times
  // N / (N - 1): an all_reduce counts twice.
  double traffic = 0;
};

// A group's thread lets go of an operation's tensors before the next one.
void settle(comm::Communicator& ranks) {
  std::vector<comm::Work> works;
  for (auto* group : ranks.groups()) {
    works.push_back(group->all_reduce(at::zeros({1}, at::kDouble)));
  }
  for (auto& work : works) work.wait();
}

// Of which groups tell: the one before it opens what is opened on first use.
void take_counted_step(RankModel& model, const RunConfig& config,
                       comm::Communicator& ranks) {
  const auto input = step_input(config, /*step=*/0, 1e-3,
                                [&](int64_t, int64_t, int64_t count) {
                                  return zeros(count, config.data.seq_len);
                                });
  model.step(input);
  for (auto* group : ranks.groups()) group->reset_stats();
  model.step(input);
}

Measured measure(const RunConfig& config, int64_t num_ranks) {
  monitor::count_tensor_bytes();
  Measured measured;
  std::mutex mutex;
  comm::run_threads(num_ranks, "shm", [&](comm::Communicator& ranks) {
    const monitor::RankMemory memory;
    RankModel model(config, ranks);
    take_counted_step(model, config, ranks);
    double bytes = 0;
    for (auto* group : ranks.groups()) {
      if (group->name() == "world") continue;  // the norm
      for (const auto& verb : group->stats()) {
        const double times = verb.verb == "all_reduce" ? 2 : 1;
        bytes += times * static_cast<double>(verb.bytes);
      }
    }
    settle(ranks);
    const auto count =
        static_cast<double>(models::num_parameters(config.model));
    const std::scoped_lock lock(mutex);
    const auto take = [&](double& most, MemoryKind kind) {
      const auto held = static_cast<double>(monitor::tensor_bytes(kind).now);
      most = std::max(most, held / count);
    };
    take(measured.parameters, MemoryKind::kParameters);
    take(measured.gradients, MemoryKind::kGradients);
    take(measured.optimizer, MemoryKind::kOptimizer);
    measured.traffic = std::max(measured.traffic, bytes / (4 * count));
  });
  return measured;
}

// Bytes a parameter of weights, gradients and AdamW's tensors, in all three
// ways to hold them: all in fp32 16; 8 + 8/N; 4 + 12/N; 16/N. In bf16 or fp16,
// fp32 masters among the optimizer's, 16; 4 + 12/N; 2 + 14/N; 16/N; with
// gradients in fp32 two more for each gradient.
TEST(RankModel, MemoryOfModelStates) {
  struct Kind {
    const char *compute, *reduce;
    double weight, gradient, optimizer;
  };
  for (const Kind& kind :
       {Kind{"fp32", "auto", 4, 4, 8}, Kind{"bf16", "bf16", 2, 2, 12},
        Kind{"bf16", "auto", 2, 4, 12}, Kind{"fp16", "fp16", 2, 2, 12},
        Kind{"fp32", "bf16", 4, 2, 8}}) {
    for (const int64_t n : {1, 2, 4, 8}) {
      for (int64_t stage = 0; stage <= 3; ++stage) {
        RunConfig config = small_run(n, stage);
        config.precision = {.compute = kind.compute, .reduce = kind.reduce};
        const Measured found = measure(config, n);
        const auto expect = [&](double measured, double whole, int64_t from) {
          const double formula =
              stage >= from ? whole / static_cast<double>(n) : whole;
          EXPECT_NEAR(measured, formula, 0.02 * formula)
              << kind.compute << " reduced in " << kind.reduce << ", stage "
              << stage << " on " << n << " ranks";
          return formula;
        };
        const double states = expect(found.parameters, kind.weight, 3) +
                              expect(found.gradients, kind.gradient, 2) +
                              expect(found.optimizer, kind.optimizer, 1);
        EXPECT_NEAR(found.states(), states, 0.02 * states);
      }
    }
  }
}

// Bytes of model states on a device, 16 a parameter, where the trunk has B and
// all experts together X parameters.
TEST(RankModel, MemoryOfExperts) {
  for (const ExpertLayout& layout : kExpertLayouts) {
    const RunConfig config = run_of_experts(layout);
    const auto experts =
        static_cast<double>(models::num_expert_parameters(config.model));
    const double trunk =
        static_cast<double>(models::num_parameters(config.model)) - experts;
    const double expected = layout.trunk * trunk + layout.of_experts * experts;
    const double measured = measure(config, 4).states() * (trunk + experts);
    EXPECT_NEAR(measured, expected, 0.02 * expected) << layout.groups;
  }
}

// Worked example 2: ranks that have the same experts reduce their gradients in
// one call for a layer that has some; where no others have them there is none.
TEST(RankModel, ReductionsOfExperts) {
  for (const ExpertLayout& layout : kExpertLayouts) {
    if (layout.replicas > 1 || layout.expert_stage == 3) continue;
    const RunConfig config = run_of_experts(layout);
    comm::run_threads(4, "shm", [&](comm::Communicator& ranks) {
      RankModel model(config, ranks);
      take_counted_step(model, config, ranks);
      std::map<std::string, int64_t> calls;
      for (auto* group : ranks.groups()) {
        for (const auto& verb : group->stats()) {
          calls[group->name() + " " + verb.verb] += verb.calls;
        }
      }
      const bool copied = layout.ep < layout.dp * layout.tp;
      EXPECT_EQ(calls["expert_dp all_reduce"], copied ? config.model.layers : 0)
          << layout.groups << ::testing::PrintToString(calls);
      // One micro-batch, two exchanges forward and two backward.
      EXPECT_EQ(calls["ep all_to_all"], 4 * config.model.layers)
          << layout.groups << ::testing::PrintToString(calls);
    });
  }
}

// What rank 0 calls in a step, beside one sum over the world: "group verb".
std::set<std::string> calls_of(const RunConfig& config, int64_t num_ranks) {
  std::set<std::string> calls;
  comm::run_threads(num_ranks, "shm", [&](comm::Communicator& ranks) {
    RankModel model(config, ranks);
    take_counted_step(model, config, ranks);
    if (ranks.rank() != 0) return;
    for (auto* group : ranks.groups()) {
      if (group->size() == 1) continue;
      for (const auto& verb : group->stats()) {
        calls.insert(group->name() + " " + verb.verb);
      }
    }
  });
  calls.erase("world all_reduce");  // the norm and the loss
  return calls;
}

// Worked example 12, which verbs each paradigm calls and which it does not.
TEST(RankModel, CallsByParadigm) {
  using Calls = std::set<std::string>;
  const auto expect = [](const char* what, const mesh::MeshConfig& mesh,
                         const Calls& calls, int64_t stage = 0,
                         int64_t num_experts = 0) {
    RunConfig config = small_run(1, 0);
    config.mesh = mesh;
    config.zero.stage = stage;
    if (num_experts > 0) {
      config.model.family = "mixtral";
      config.model.ffn = 64;
      config.model.moe.experts = num_experts;
    }
    config.batch = {.global = 4, .micro = 1};
    config.tensor.sequence_parallel = false;
    complete(config, 4);
    EXPECT_EQ(calls_of(config, 4), calls) << what;
  };
  const Calls d{"dp_replicate all_reduce"};
  const Calls z{"dp_shard all_gather", "dp_shard reduce_scatter"};
  const Calls t{"tp all_reduce"};
  // How many tokens go to each expert is gathered first.
  const Calls e{"ep all_gather", "ep all_to_all"};
  const Calls p{"pp send", "pp recv"};
  const auto with = [](Calls calls, const Calls& more) {
    calls.insert(more.begin(), more.end());
    return calls;
  };
  expect("D", {.dp = 4}, d);
  for (const int64_t stage : {1, 2, 3}) expect("Z", {.dp = 4}, z, stage);
  expect("TP", {.tp = 4}, t);
  expect("PP", {.pp = 4}, p);
  expect("TP+D", {.dp = 2, .tp = 2}, with(t, d));
  expect("PP+D", {.pp = 2, .dp = 2}, with(p, d));
  expect("TP+Z", {.dp = 2, .tp = 2}, with(t, z), 3);
  expect("TP+PP", {.pp = 2, .tp = 2}, with(t, p));
  expect("E", {.dp = 4, .ep = 4}, with(d, e), 0, 4);
  const Calls copied = with(e, {"expert_dp all_reduce"});
  expect("E+D", {.dp = 4, .ep = 2}, with(d, copied), 0, 4);
  const Calls sharded =
      with(e, {"expert_dp all_gather", "expert_dp reduce_scatter"});
  expect("E+Z", {.dp = 4, .ep = 2}, with(z, sharded), 3, 4);
  // Ranks of tp route a piece of the tokens each: what becomes of them is
  // gathered, and gradients of gates are summed over these ranks too.
  const Calls routed{"tp all_gather", "dp_replicate+tp all_reduce"};
  expect("E+D+TP", {.dp = 2, .tp = 2, .ep = 2},
         with(with(with(t, d), copied), routed), 0, 4);
}

// Worked example 10: beside these one scalar.
TEST(RankModel, ClippingReducesOneNumber) {
  RunConfig config = small_run(4, 2);
  comm::run_threads(4, "shm", [&](comm::Communicator& ranks) {
    RankModel model(config, ranks);
    take_counted_step(model, config, ranks);
    const auto stats = ranks.world().stats();
    EXPECT_EQ(stats.size(), 1U);
    for (const auto& verb : stats) {
      EXPECT_EQ(verb.verb, "all_reduce");
      EXPECT_EQ(verb.calls, 1);
      EXPECT_EQ(verb.bytes, sizeof(double));
    }
  });
}

// Weights alone, of stage 3 a share of them, and the same loss.
TEST(RankModel, EvaluationHoldsWeightsAlone) {
  monitor::count_tensor_bytes();
  for (int64_t stage : {0, 3}) {
    const RunConfig config = small_run(2, stage);
    const double whole =
        4.0 * static_cast<double>(models::num_parameters(config.model));
    comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
      const data::Batch batch = zeros(1, config.data.seq_len);
      const auto loss_by = [&](program::Purpose use) {
        RankModel model(config, ranks, use);
        return model.evaluate(batch).sum.item<double>();
      };
      const monitor::RankMemory memory;
      RankModel model(config, ranks, program::Purpose::kEvaluation);
      const double loss = model.evaluate(batch).sum.item<double>();
      settle(ranks);
      const auto held = [](MemoryKind kind) {
        return static_cast<double>(monitor::tensor_bytes(kind).now);
      };
      EXPECT_NEAR(held(MemoryKind::kParameters), stage == 3 ? whole / 2 : whole,
                  0.02 * whole);
      EXPECT_EQ(held(MemoryKind::kGradients), 0);
      EXPECT_EQ(held(MemoryKind::kOptimizer), 0);
      EXPECT_EQ(loss, loss_by(program::Purpose::kTraining));
    });
  }
}

// What the input's part keeps for the weights' part is let go of behind it.
TEST(RankModel, SplitBackwardLetsGo) {
  monitor::count_tensor_bytes();
  RunConfig config = small_run(1, 0);
  config.recompute.mode = "block";
  config.batch = {.global = 3, .micro = 1};
  complete(config, 1);
  const auto kept = [&](const program::passes::Choice& passes) {
    std::vector<int64_t> bytes;  // behind each micro-batch's backward
    comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
      const monitor::RankMemory memory;
      RankModel model(config, ranks, program::Purpose::kTraining, passes);
      const auto input = step_input(config, /*step=*/0, 1e-3,
                                    [&](int64_t, int64_t, int64_t count) {
                                      return zeros(count, config.data.seq_len);
                                    });
      model.step(input, [&](const program::Instruction& done, double, double) {
        if (!program::adds_gradients(done.op) || done.unit > 0) return;
        bytes.push_back(monitor::tensor_bytes(MemoryKind::kWork).now);
      });
    });
    return bytes;
  };
  const auto whole = kept({});
  EXPECT_EQ(whole.size(), 3);
  EXPECT_EQ(kept({.with = {"split_backward"}}), whole);
}

// W(t + 1) = W(t) - lr f'(W(t - 1)), the gradient by a model that knows nothing
// of versions, whose weights are set to it.
TEST(RankModel, DelayedStepsAreAsThePaperHasThem) {
  RunConfig plain = small_run(1, 0);
  plain.precision.compute = "fp64";
  plain.optimizer = {
      .type = "sgd", .lr = 0.1, .momentum = 0, .weight_decay = 0};
  plain.optimizer.clip_norm = 0;
  plain.batch = {.global = 4, .micro = 1};
  complete(plain, 1);
  RunConfig delayed = plain;
  delayed.pipeline.schedule = "pipedream_2bw";
  const double lr = plain.optimizer.lr;
  const auto input = [&](int64_t step) {
    const auto batch = [&](int64_t of, int64_t first, int64_t count) {
      const at::Tensor ids =
          (at::arange(count * plain.data.seq_len) * 7 + 31 * first + 101 * of)
              .remainder(plain.model.vocab)
              .view({count, plain.data.seq_len});
      return data::Batch{ids, ids.roll(1, 1)};
    };
    return step_input(plain, step, lr, batch);
  };
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    RankModel teacher(plain, ranks), model(delayed, ranks);
    const auto& given = teacher.composed().parameters->parameters();
    const auto& found = model.composed().parameters->parameters();
    const at::NoGradGuard no_grad;
    std::vector<std::vector<at::Tensor>> weights(1);
    for (const auto& each : given) weights[0].push_back(each.shard.clone());
    for (int64_t step = 1; step <= 6; ++step) {
      for (size_t i = 0; i < given.size(); ++i) {
        at::Tensor shard = given[i].shard;
        shard.copy_(weights[std::max<int64_t>(step - 2, 0)][i]);
      }
      teacher.step(input(step));
      auto& next = weights.emplace_back();
      std::optional<StepInput> begun;
      if (step % 3 != 0) begun = input(step + 1);
      model.step(input(step), nullptr, std::move(begun));
      for (size_t i = 0; i < given.size(); ++i) {
        next.push_back(weights[step - 1][i] - lr * given[i].gradient);
        const double error = (found[i].shard - next[i]).norm().item<double>() /
                             next[i].norm().item<double>();
        EXPECT_LT(error, 1e-14) << given[i].name << " behind step " << step;
      }
      // At weights that are as near as these.
      EXPECT_NEAR(model.actor().loss_sum() / teacher.actor().loss_sum(), 1,
                  1e-14);
    }
  });
}

// In units of the parameters: 2 for stages 0, 1 and 2; 3 for stage 3, or 2 when
// gathered parameters are kept until the backward.
TEST(RankModel, TrafficOfAStep) {
  for (const int64_t n : {2, 4}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      const double units = stage == 3 ? 3 : 2;
      EXPECT_NEAR(measure(small_run(n, stage), n).traffic, units, 0.01 * units)
          << "stage " << stage << " on " << n << " ranks";
    }
    RunConfig kept = small_run(n, 3);
    kept.zero.reshard_after_forward = false;
    EXPECT_NEAR(measure(kept, n).traffic, 2, 0.02);
  }
}

// The micro-batches that each rank of a pipeline reads, in two steps of three.
std::vector<int64_t> reads_of(const std::string& reader, bool documents) {
  RunConfig config = small_run(1, 0);
  config.mesh = {.pp = 4};
  config.batch = {.global = 3, .micro = 1};
  config.data.reader = reader;
  config.data.intra_document_masking = documents;
  complete(config, 4);
  std::vector<int64_t> reads(4);
  comm::run_threads(4, "shm", [&](comm::Communicator& ranks) {
    RankModel model(config, ranks);
    for (const int64_t step : {0, 1}) {
      auto input =
          step_input(config, step, 1e-3, [&](int64_t, int64_t, int64_t count) {
            ++reads[ranks.rank()];
            data::Batch batch = zeros(count, config.data.seq_len);
            if (documents) batch.document_starts = batch.inputs;
            return batch;
          });
      if (step == 1) input.next.reset();  // the last one
      model.step(std::move(input));
    }
  });
  return reads;
}

TEST(RankModel, ReadsWhereSomethingIsNeededOrForAll) {
  using Reads = std::vector<int64_t>;
  EXPECT_EQ(reads_of("every", false), (Reads{6, 0, 0, 6}));
  EXPECT_EQ(reads_of("every", true), (Reads{6, 6, 6, 6}));
  EXPECT_EQ(reads_of("first", false), (Reads{6, 0, 0, 0}));
  EXPECT_EQ(reads_of("first", true), (Reads{6, 0, 0, 0}));
}

// Bytes out of rank 0 in a step, by group: what docs/parallelism.md says. Of
// those that `counts`; null: of all.
std::map<std::string, double> bytes_out(
    const RunConfig& config, int64_t num_ranks,
    const std::function<bool(const comm::Group&)>& counts = nullptr) {
  std::map<std::string, double> bytes;
  comm::run_threads(num_ranks, "shm", [&](comm::Communicator& ranks) {
    RankModel model(config, ranks);
    const auto input = step_input(config, /*step=*/0, 1e-3,
                                  [&](int64_t, int64_t, int64_t count) {
                                    return zeros(count, config.data.seq_len);
                                  });
    model.step(input);
    for (auto* group : ranks.groups()) group->reset_stats();
    model.step(input);
    if (ranks.rank() != 0) return;
    for (auto* group : ranks.groups()) {
      if (counts && !counts(*group)) continue;
      const auto n = static_cast<double>(group->size());
      for (const auto& verb : group->stats()) {
        const double share = verb.verb == "all_reduce" ? 2 * (n - 1) / n
                             : verb.verb == "send"     ? 1
                             : verb.verb == "recv"     ? 0
                                                       : (n - 1) / n;
        bytes[group->name()] += share * static_cast<double>(verb.bytes);
      }
    }
  });
  return bytes;
}

// Bytes of a step in rank 0's groups, as these count them: the mean of several,
// from one without a batch that has begun to one that begins none.
double counted_bytes(const RunConfig& config, int64_t num_ranks) {
  constexpr int64_t kSteps = 4;
  double bytes = 0;
  comm::run_threads(num_ranks, "shm", [&](comm::Communicator& ranks) {
    RankModel model(config, ranks);
    const auto input = [&](int64_t step) {
      return step_input(config, step, 1e-3,
                        [&](int64_t, int64_t, int64_t count) {
                          return zeros(count, config.data.seq_len);
                        });
    };
    model.step(input(0));
    for (auto* group : ranks.groups()) group->reset_stats();
    for (int64_t step = 1; step <= kSteps; ++step) {
      std::optional<StepInput> next;
      if (model.goes_on() && step < kSteps) next = input(step + 1);
      model.step(input(step), nullptr, std::move(next));
    }
    if (ranks.rank() != 0) return;
    for (auto* group : ranks.groups()) {
      for (const auto& verb : group->stats()) {
        bytes += static_cast<double>(sent_bytes(verb.verb, verb.bytes));
      }
    }
  });
  return bytes / kSteps;
}

TEST(RankModel, PlansSayWhatAStepMoves) {
  const auto expect = [](RunConfig config, int64_t num_ranks) {
    complete(config, num_ranks);
    const auto planned =
        static_cast<double>(plan_step(config, {}).stages.at(0).moved_bytes);
    EXPECT_NEAR(counted_bytes(config, num_ranks), planned, 0.01 * planned)
        << to_json(config);
  };
  expect(small_run(2, 3), 2);
  RunConfig muon = small_run(2, 1);
  muon.optimizer.type = "muon";
  expect(muon, 2);
  RunConfig ring = small_run(1, 0);
  ring.mesh.cp = 4;
  ring.context.method = "ring";
  expect(ring, 4);
  RunConfig delayed = small_run(1, 0);
  delayed.mesh.pp = 2;
  delayed.pipeline.schedule = "pipedream_2bw";
  delayed.batch = {.global = 4, .micro = 1};
  expect(delayed, 2);
}

// Bytes out of rank 0 in a step to ranks of other replicas, in groups that have
// such ranks.
double bytes_between_replicas(const RunConfig& config, int64_t num_ranks) {
  const auto mesh = mesh_of(config, num_ranks);
  const auto replica_of = [&](int64_t rank) {
    return mesh.coord_of(rank)[mesh::Axis::kDpReplicate];
  };
  const auto by_group = bytes_out(config, num_ranks, [&](const auto& group) {
    return std::ranges::any_of(group.ranks(), [&](int64_t rank) {
      return replica_of(rank) != replica_of(0);
    });
  });
  return std::accumulate(
      by_group.begin(), by_group.end(), 0.0,
      [](double sum, const auto& each) { return sum + each.second; });
}

// Of P bytes of this rank's experts and D of all else, on 2 replicas of 4 ranks
// each: shards of D over 4 are summed over 2, and so are those of P over 2; but
// over all 4 that hold an expert P itself is gathered and reduced.
TEST(RankModel, ExpertsByReplicaMoveLessBetweenReplicas) {
  for (const int64_t stage : {1, 2, 3}) {
    RunConfig config = small_run(1, 0);
    config.model.family = "mixtral";
    config.model.ffn = 64;
    config.model.moe.experts = 4;
    config.mesh = {};
    config.mesh.dp_replicate = 2;
    config.mesh.dp_shard = 4;
    config.mesh.ep = 2;
    config.batch = {.global = 8};
    config.zero.stage = stage;
    complete(config, 8);
    const auto experts =
        static_cast<double>(models::num_expert_parameters(config.model));
    const auto all = static_cast<double>(models::num_parameters(config.model));
    const double p = 4 * experts / 2, d = 4 * (all - experts);
    const double dense = d / 4;
    const double over_all = dense + (stage == 3 ? 3 : 2) * 0.75 * p;
    EXPECT_NEAR(bytes_between_replicas(config, 8), over_all, 0.01 * over_all);
    config.zero.expert_shard = "dp_shard";
    complete(config, 8);
    const double inside = dense + p / 2;
    EXPECT_NEAR(bytes_between_replicas(config, 8), inside, 0.01 * inside);
  }
}

TEST(RankModel, BytesByAxis) {
  constexpr int64_t kRanks = 4, kMicrobatches = 2;
  RunConfig base = small_run(1, 0);
  base.batch = {.global = 2 * kMicrobatches, .micro = 2};
  const double f = (kRanks - 1.0) / kRanks, m = kMicrobatches;
  const auto layers = static_cast<double>(base.model.layers);
  // Of a micro-batch: tokens, hidden states, keys and values (also queries
  // twice: there are as many heads).
  const double tokens = 2.0 * static_cast<double>(base.data.seq_len);
  const double hidden = 4 * tokens * static_cast<double>(base.model.hidden);
  const auto expect = [&](RunConfig config, const char* group, double formula) {
    config.mesh.dp = 1;
    complete(config, kRanks);
    EXPECT_NEAR(bytes_out(config, kRanks)[group], formula, 0.01 * formula)
        << group;
  };

  RunConfig tensor = base;
  tensor.mesh.tp = kRanks;
  expect(tensor, "tp",
         m * 2 * f * ((4 * layers + 2) * hidden + 3 * 4 * tokens));
  tensor.tensor.sequence_parallel = true;
  const double norms = (2 * layers + 1) * 4 * 64;
  expect(
      tensor, "tp",
      m * f * ((8 * layers + 4) * hidden + 2 * 3 * 4 * tokens) + 2 * f * norms);

  RunConfig context = base;
  context.mesh.cp = kRanks;
  const double here = 2 * hidden / kRanks;  // keys and values
  const double sum =
      2 * f * 4 * static_cast<double>(models::num_parameters(base.model));
  context.context.method = "ring";
  expect(context, "cp", sum + m * layers * (3 * kRanks - 2) * here);
  context.context.method = "ulysses";
  expect(context, "cp", sum + m * layers * 2 * f * 2 * here);
  context.context.method = "allgather";
  expect(context, "cp", sum + m * layers * 2 * (kRanks - 1) * here);

  RunConfig pipeline = base;
  pipeline.mesh.pp = kRanks;
  expect(pipeline, "pp",
         m * hidden);  // the first stage has no gradient to send

  // Every token goes to every expert: the rows are shared out evenly.
  RunConfig experts = base;
  experts.model.family = "mixtral";
  experts.model.ffn = 64;
  experts.model.moe.experts = experts.model.moe.top_k = kRanks;
  experts.mesh.tp = experts.mesh.ep = kRanks;
  experts.tensor.sequence_parallel = true;
  expect(
      experts, "ep",
      m * layers * f * (4 * hidden / kRanks * kRanks + 8.0 * kRanks * kRanks));
  experts.expert.dispatch_chunks = 2;  // of one expert each: one chunk
  expect(
      experts, "ep",
      m * layers * f * (4 * hidden / kRanks * kRanks + 8.0 * kRanks * kRanks));
  // Ranks route a piece of the tokens each, and gather what they became.
  experts.tensor.sequence_parallel = false;
  const double gates = 4 * kRanks * static_cast<double>(base.model.hidden);
  const double balance = 4.0 * 2 * kRanks;
  expect(experts, "tp",
         m * f * ((6 * layers + 4) * hidden + 2 * 3 * 4 * tokens) +
             2 * f * layers * (gates + m * balance));
}

}  // namespace
}  // namespace tessera::engine
