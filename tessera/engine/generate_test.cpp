#include "tessera/engine/generate.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "tessera/core/error.h"
#include "tests/support/small_run.h"

namespace tessera::engine {
namespace {

using testing::small_run;
using Change = std::function<void(RunConfig&)>;

RunConfig configuration(const char* family, int64_t ranks,
                        const Change& change) {
  RunConfig config = small_run(1, 0);
  config.model = {.family = family, .layers = 4, .hidden = 32, .heads = 4};
  config.model.vocab = 61;
  config.model.max_seq = 32;
  if (config.model.family == "mixtral") config.model.moe.experts = 4;
  config.mesh = {};
  config.batch = {.global = 8};
  config.precision.compute = "fp64";
  change(config);
  complete(config, config.mesh.star() ? implied_world_size(config) : ranks);
  return config;
}

std::vector<int64_t> prompt() { return {3, 1, 4}; }

models::GenerateOptions options() {
  return {.max_new_tokens = 20, .seed = 7, .sample = 5, .stop_tokens = {60}};
}

// Weights so large that what experts add is heard in the text.
void enlarge(RankModel& model, double factor) {
  for (const auto& each : nn::parameters_of(model.decoder())) {
    each.tensor.detach().mul_(factor);
  }
}

// Until seq_len, 16 tokens, are there.
std::vector<int64_t> text_of(const RunConfig& config, int64_t ranks,
                             double factor = 1) {
  std::vector<std::vector<int64_t>> texts(ranks);
  const auto write = [&](comm::Communicator& communicator) {
    RankModel model(config, communicator);
    if (factor != 1) enlarge(model, factor);
    texts[communicator.rank()] = generate_by_evaluations(
        model, communicator, config.data.seq_len, prompt(), options());
  };
  comm::run_threads(ranks, "shm", write);
  for (const auto& text : texts) EXPECT_EQ(text, texts[0]);
  return texts[0];
}

// By one rank and a cache, which knows nothing of programs.
std::vector<int64_t> expected(const char* family, double factor = 1) {
  const RunConfig config = configuration(family, 1, [](RunConfig&) {});
  std::vector<int64_t> text;
  comm::run_threads(1, "shm", [&](comm::Communicator& ranks) {
    RankModel model(config, ranks);
    if (factor != 1) enlarge(model, factor);
    text = models::generate(model.decoder(), prompt(), options());
  });
  constexpr size_t kRoom = 16 - 3;
  text.resize(std::min(text.size(), kRoom));
  return text;
}

struct Case {
  const char* family;
  int64_t ranks;
  Change change;
};

TEST(GenerateByEvaluations, IsTheTextOfOneRankOnAnyMesh) {
  const std::vector<Case> cases = {
      {"llama", 1, [](auto&) {}},
      {"llama", 2, [](auto& c) { c.mesh.dp_replicate = 2; }},
      {"llama", 2, [](auto& c) { c.mesh.dp = 2, c.zero.stage = 1; }},
      {"llama", 2, [](auto& c) { c.mesh.dp = 2, c.zero.stage = 2; }},
      {"gpt2", 4,
       [](auto& c) {
         c.mesh.dp_replicate = c.mesh.dp_shard = 2;
         c.zero.stage = 3;
       }},
      {"gpt2", 2,
       [](auto& c) { c.mesh.tp = 2, c.tensor.sequence_parallel = true; }},
      {"llama", 4,
       [](auto& c) { c.mesh.dp = 2, c.mesh.tp = 2, c.zero.stage = 3; }},
      {"llama", 2, [](auto& c) { c.mesh.cp = 2; }},
      {"gpt2", 4,
       [](auto& c) {
         c.mesh.cp = c.mesh.tp = 2;
         c.tensor.sequence_parallel = true;
         c.context.method = "ulysses";
       }},
      {"llama", 2, [](auto& c) { c.mesh.pp = 2; }},
      {"llama", 4,
       [](auto& c) {
         c.mesh.pp = c.mesh.dp = 2;
         c.zero.stage = 3;
         c.pipeline.schedule = "interleaved";
         c.pipeline.chunks = 2;
         c.batch.micro = 2;
       }},
      {"mixtral", 4,
       [](auto& c) { c.mesh.dp = 4, c.mesh.ep = 2, c.zero.stage = 3; }},
      {"mixtral", 4,
       [](auto& c) { c.mesh.dp = c.mesh.tp = c.mesh.ep = c.mesh.etp = 2; }},
      {"llama", 1, [](auto& c) { c.mesh.dp = 2, c.mesh.data_parallel = "dp"; }},
  };
  for (const Case& each : cases) {
    const RunConfig config =
        configuration(each.family, each.ranks, each.change);
    EXPECT_EQ(text_of(config, each.ranks), expected(each.family))
        << each.family << " " << to_json(config);
  }
}

// What is written so far is less than a sample, and is filled up where ranks
// cut it: a capacity would be of another number of tokens each time.
TEST(GenerateByEvaluations, ExpertsDropNothing) {
  const std::vector<Case> cases = {
      {"mixtral", 1, [](auto&) {}},
      {"mixtral", 2, [](auto& c) { c.mesh.cp = 2; }},
      {"mixtral", 2,
       [](auto& c) { c.mesh.tp = 2, c.tensor.sequence_parallel = true; }},
      {"mixtral", 1,
       [](auto& c) { c.mesh.dp = 2, c.mesh.data_parallel = "dp"; }},
  };
  constexpr double kFactor = 8;
  const auto text = expected("mixtral", kFactor);
  EXPECT_FALSE(text.empty());
  for (const Case& each : cases) {
    const RunConfig config =
        configuration(each.family, each.ranks, [&](RunConfig& c) {
          c.model.moe.capacity_factor = 0.25;
          each.change(c);
        });
    EXPECT_EQ(text_of(config, each.ranks, kFactor), text) << to_json(config);
  }
}

// Whoever draws, all hear of weights that are no numbers, and end alike.
void expect_refused_on_every_rank(
    const std::function<void(RankModel&, comm::Communicator&)>& write) {
  const RunConfig config =
      configuration("llama", 2, [](auto& c) { c.mesh.tp = 2; });
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    RankModel model(config, ranks);
    for (const auto& each : nn::parameters_of(model.decoder())) {
      each.tensor.detach().fill_(std::nan(""));
    }
    EXPECT_THROW(write(model, ranks), Error);
    at::Tensor one = at::ones({1});  // no rank waits in another place
    ranks.world().all_reduce(one).synchronize();
    EXPECT_EQ(one.item<double>(), 2);
  });
}

TEST(GenerateByEvaluations, RefusesWhatIsNoNumberOnEveryRank) {
  expect_refused_on_every_rank([](RankModel& model, comm::Communicator& ranks) {
    generate_by_evaluations(model, ranks, 16, prompt(), options());
  });
}

TEST(Generate, RefusesWhatIsNoNumberOnEveryRank) {
  expect_refused_on_every_rank([](RankModel& model, comm::Communicator& ranks) {
    generate(model, ranks, prompt(), options());
  });
}

}  // namespace
}  // namespace tessera::engine
