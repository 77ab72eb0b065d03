#include "tessera/engine/product_floor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/engine/memory_plan.h"
#include "tessera/engine/step_programs.h"
#include "tessera/models/model.h"
#include "tessera/parallel/compose.h"
#include "tests/support/small_run.h"

namespace tessera::engine {
namespace {

RunConfig run_of(int64_t pp, const char* family, int64_t lora_rank = 0) {
  RunConfig config;
  config.data.train = {"random tokens"};
  config.data.seq_len = 16;
  config.model.family = family;
  config.model.layers = 4;
  config.model.hidden = 32;
  config.model.heads = 4;
  config.model.vocab = 96;
  if (config.model.family == "mixtral") config.model.moe.experts = 4;
  if (lora_rank > 0) {
    config.model.lora.rank = lora_rank;
    config.model.lora.targets = {"*.attention.*"};
  }
  config.mesh.pp = pp;
  config.batch.micro = 2;
  config.batch.global = 6;
  complete(config, pp);
  return config;
}

// Of a rank: its program's products, and what its facts say they cost.
struct Found {
  double products = 0, facts = 0;
};

Found found_of(const RunConfig& config, int64_t rank) {
  const auto mesh =
      config.mesh.mesh(implied_world_size(config), config.zero.stage);
  const auto model = models::make_model(config.model);
  parallel::place(*model, mesh, config);
  const auto units = parallel::model_units(*model, mesh, config);
  const auto program =
      lowered_program(config, mesh, units, mesh.coord_of(rank)[mesh::Axis::kPp],
                      program::Purpose::kTraining);
  const auto facts = facts_of(config, mesh, mesh.coord_of(rank));
  const auto here = units.units_of(mesh, rank);
  Found found;
  const ProductFloor floor(products_of(program, here, facts), at::kFloat,
                           facts.batches);
  found.products = floor.flops();
  const auto add = [&](const program::UnitFacts& of) {
    found.facts +=
        static_cast<double>(accumulation(config)) *
        static_cast<double>(of.forward.matmul + of.backward_input.matmul +
                            of.backward_weight.matmul);
  };
  for (const auto& chunk : here.chunks) {
    for (const int64_t unit : chunk) add(facts.units.at(unit));
  }
  const bool is_last = here.chunks.back().back() == model->num_units() - 1;
  if (is_last) add(facts.loss);
  return found;
}

TEST(ProductFloor, HasTheProductsOfTheFacts) {
  for (const char* family : {"llama", "gpt2", "mixtral"}) {
    for (const int64_t pp : {1, 2}) {
      for (const int64_t lora_rank : {0, 4}) {
        const RunConfig config = run_of(pp, family, lora_rank);
        for (int64_t rank = 0; rank < pp; ++rank) {
          const Found found = found_of(config, rank);
          EXPECT_GT(found.products, 0);
          EXPECT_DOUBLE_EQ(found.products, found.facts)
              << family << " " << rank << ", adapters of " << lora_rank;
        }
      }
    }
  }
}

TEST(ProductFloor, MultipliesRowsThatWaitAtOnce) {
  const program::MatrixProduct layer{
      .rows = 8, .in = 32, .out = 48, .together = 4};
  // Two weights, seven micro-batches.
  const ProductFloor floor(std::vector(14, layer), at::kFloat, /*batches=*/7);
  std::vector<std::pair<int64_t, int64_t>> gradients;
  for (const auto& each : floor.products()) {
    if (each.part != FloorProduct::kWeightGradient) continue;
    gradients.emplace_back(each.shape.rows, each.count);
  }
  EXPECT_THAT(gradients, ::testing::UnorderedElementsAre(std::pair(32, 2),
                                                         std::pair(24, 2)));
  EXPECT_DOUBLE_EQ(floor.flops(), 3 * 14 * 2 * 8.0 * 32 * 48);
}

TEST(ProductFloor, TakesTimeForEachProduct) {
  const program::MatrixProduct layer{.rows = 64, .in = 32, .out = 48};
  const program::MatrixProduct first{
      .rows = 64, .in = 32, .out = 48, .input_gradient = false};
  ProductFloor floor({layer, layer, first}, at::kBFloat16);
  ASSERT_EQ(floor.products().size(), 3);
  EXPECT_EQ(floor.products()[0].count, 3);  // forward
  EXPECT_EQ(floor.products()[1].count, 2);  // dx
  EXPECT_EQ(floor.products()[2].count, 3);  // dW
  EXPECT_EQ(floor.flops(), 8 * 2.0 * 64 * 32 * 48);
  EXPECT_GT(floor.run(), 0);
  EXPECT_GT(floor.flops_per_s(), 0);
}

}  // namespace
}  // namespace tessera::engine
