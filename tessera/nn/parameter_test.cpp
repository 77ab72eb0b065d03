#include "tessera/nn/parameter.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/mesh/slice.h"
#include "tessera/nn/blocks.h"

namespace tessera::nn {
namespace {

using mesh::Axis;
using mesh::Placement;

class Pair : public torch::nn::Module {
 public:
  Pair()
      : first(register_module("first", std::make_shared<Linear>(
                                           LinearOptions{5, 7, true, 0.02}))),
        second(register_module("second", std::make_shared<Linear>(LinearOptions{
                                             7, 5, false, 0.5}))) {}
  std::shared_ptr<Linear> first;
  std::shared_ptr<Linear> second;
};

std::vector<std::string> names_of(torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& parameter : parameters_of(module)) {
    names.push_back(parameter.name);
  }
  return names;
}

TEST(Parameters, AreInOrderOfDeclaration) {
  Pair pair;
  EXPECT_THAT(
      names_of(pair),
      ::testing::ElementsAre("first.weight", "first.bias", "second.weight"));
  EXPECT_EQ(num_parameters(pair), 35 + 7 + 35);
}

TEST(Parameters, ATiedOneCountsOnce) {
  class Other : public torch::nn::Module {
   public:
    explicit Other(const at::Tensor& weight) {
      register_parameter("weight", weight);
    }
  };
  Pair tied;
  tied.register_module("other", std::make_shared<Other>(tied.first->weight()));
  EXPECT_EQ(names_of(tied).size(), 3u);
  EXPECT_EQ(num_parameters(tied), 35 + 7 + 35);
}

TEST(Parameters, OfAPlainModuleAreTakenAsTheyAre) {
  class Plain : public torch::nn::Module {
   public:
    Plain() { register_parameter("w", at::ones({2, 3})); }
  } plain;
  const auto parameters = parameters_of(plain);
  ASSERT_EQ(parameters.size(), 1u);
  EXPECT_EQ(parameters[0].spec->layout, mesh::Layout({2, 3}));
}

// Also where the root stacks them, or is the stack itself.
TEST(NamesOfExperts, HaveTheirNumbersBeforeTheProjection) {
  const mesh::Layout layout({2, 3, 4}, mesh::View::kExperts);
  using ::testing::ElementsAre;
  EXPECT_THAT(
      names_of_experts("moe.experts.gate.weight", layout),
      ElementsAre("moe.experts.0.gate.weight", "moe.experts.1.gate.weight"));
  EXPECT_THAT(names_of_experts("gate.weight", layout),
              ElementsAre("0.gate.weight", "1.gate.weight"));
  EXPECT_THAT(names_of_experts("weight", layout),
              ElementsAre("0.weight", "1.weight"));
}

TEST(Materialise, HandlesOfTheBlockSeeTheMemory) {
  Pair pair;
  EXPECT_EQ(pair.first->weight().numel(), 0);
  materialise(pair, {.dtype = at::kDouble});
  EXPECT_EQ(pair.first->weight().sizes(), at::IntArrayRef({7, 5}));
  EXPECT_EQ(pair.first->weight().scalar_type(), at::kDouble);
  EXPECT_TRUE(pair.first->weight().requires_grad());
  EXPECT_TRUE(pair.first->weight().is_leaf());
}

TEST(Materialise, IsAPureFunctionOfSeedAndName) {
  Pair a, b, c;
  materialise(a, {.seed = 3});
  materialise(b, {.seed = 3});
  materialise(c, {.seed = 4});
  EXPECT_TRUE(at::equal(a.first->weight(), b.first->weight()));
  EXPECT_FALSE(at::equal(a.first->weight(), c.first->weight()));
  EXPECT_FALSE(at::equal(a.first->weight().view({-1}) / 0.02,
                         a.second->weight().view({-1}) / 0.5));
}

TEST(Materialise, HasTheMomentsThatWereDeclared) {
  class Big : public torch::nn::Module {
   public:
    Big() {
      linear = register_module("linear", std::make_shared<Linear>(LinearOptions{
                                             400, 500, true, 0.5}));
    }
    std::shared_ptr<Linear> linear;
  } big;
  materialise(big, {.seed = 1, .dtype = at::kDouble});
  const auto& w = big.linear->weight();              // 200,000 draws
  EXPECT_NEAR(w.mean().item<double>(), 0.0, 0.006);  // 5 sigma
  EXPECT_NEAR(w.std().item<double>(), 0.5, 0.004);   // 5 sigma
  EXPECT_NEAR(((w / 0.5).pow(4)).mean().item<double>(), 3.0, 0.11);
  EXPECT_EQ(parameters_of(big)[1].tensor.abs().sum().item<double>(), 0.0);
}

// Any box of any mesh holds the bits of the whole.
TEST(Materialise, EveryMeshGivesTheSameBits) {
  Pair whole;
  materialise(whole, {.seed = 11});
  const auto expected = parameters_of(whole);
  for (const auto& degrees :
       {mesh::Degrees{.dp_shard = 3}, mesh::Degrees{.tp = 2},
        mesh::Degrees{.dp_shard = 2, .tp = 2}, mesh::Degrees{.dp_shard = 16}}) {
    const int64_t world = degrees.dp_shard * degrees.tp;
    const mesh::DeviceMesh mesh(degrees, world);
    for (int64_t rank = 0; rank < world; ++rank) {
      Pair part;
      const auto parameters = parameters_of(part);
      for (const auto& parameter : parameters) {
        auto& layout = parameter.spec->layout;
        layout = layout.with(Axis::kDpShard, Placement::shard(0));
        const auto dims = layout.global_shape().size();
        layout = layout.with(Axis::kTp,
                             Placement::shard(static_cast<int64_t>(dims) - 1));
      }
      const auto coord = mesh.coord_of(rank);
      materialise(part, mesh, coord, {.seed = 11});
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto box = parameters[i].spec->layout.local_box(mesh, coord);
        EXPECT_TRUE(at::equal(parameters[i].tensor,
                              mesh::slice(expected[i].tensor, box)))
            << parameters[i].name << " on " << mesh.describe(rank);
      }
    }
  }
}

TEST(Materialise, NarrowTypesAreTheRoundedWideOnes) {
  Pair wide, narrow;
  materialise(wide, {.seed = 2});
  materialise(narrow, {.seed = 2, .dtype = at::kBFloat16});
  EXPECT_TRUE(at::equal(wide.first->weight().to(at::kBFloat16),
                        narrow.first->weight()));
}

}  // namespace
}  // namespace tessera::nn
