#include "tessera/parallel/data/parameter_storage.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/parallel/data/parameter_facts.h"

namespace tessera::parallel::data {
namespace {

TEST(ResizeStorage, TakesMemoryOfTheTensorsDevice) {
  for (const at::Device device : {at::kCPU, at::kMeta}) {
    const at::Tensor x = at::ones({1000}, device);
    const at::Tensor view = x.view({10, 100});
    resize_storage(x, 0);
    EXPECT_EQ(x.storage().nbytes(), 0);
    EXPECT_EQ(x.storage().device(), device);
    resize_storage(x, 4000);
    EXPECT_EQ(x.storage().nbytes(), 4000);
    EXPECT_EQ(x.storage().device(), device);
    x.fill_(2);
    EXPECT_TRUE(view.is_alias_of(x));
    if (device.is_cpu()) {
      EXPECT_EQ(view.sum().item<double>(), 2000);
    }
  }
}

// A matrix (8, 4) on two ranks, who both orthogonalise all of it.
TEST(ParameterFacts, AnUpdateIsOfTheShardAndOfWholeMatrices) {
  const mesh::DeviceMesh ranks({.dp_shard = 2}, 2);
  nn::ParameterSpec spec{.layout = mesh::Layout({8, 4}).with(
                             mesh::Axis::kDpShard, mesh::Placement::shard(0)),
                         .init = nn::Init::zeros(),
                         .units = {1}};
  const auto facts = [&] {
    return parameter_facts(
               {&spec}, ranks, ranks.coord_of(0),
               {.zero_stage = 1,
                .compute = at::kBFloat16,
                .gradient = at::kFloat,
                .kept = {.matrix_moments = 1},
                .updates = {.whole_matrices = true, .dtype = at::kBFloat16},
                .num_units = 3})
        .at(0);
  };
  EXPECT_EQ(facts().read_bytes, 32 * 2);
  EXPECT_EQ(facts().shard_gradient_bytes, 16 * 4);
  // With a master, a moment, and what both round to.
  EXPECT_EQ(facts().updated_bytes, 16 * (4 + 4 + 4 + 2));
  EXPECT_EQ(facts().update_flops,
            5 * (2 * 4 * 8 * 4 + 2 * 4 * 4 * 4 + 2 * 4 * 4 * 8));
  spec.is_frozen = true;
  EXPECT_EQ(facts().read_bytes, 32 * 2);
  EXPECT_EQ(facts().shard_gradient_bytes, 0);
  EXPECT_EQ(facts().updated_bytes, 0);
  EXPECT_EQ(facts().update_flops, 0);
}

}  // namespace
}  // namespace tessera::parallel::data
