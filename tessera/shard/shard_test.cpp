#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/shard/flat_buffer.h"
#include "tessera/shard/slice.h"

namespace tessera::shard {
namespace {

TEST(FlatBuffer, ViewsShareTheBufferAndKeepTheirShapes) {
  FlatBuffer buffer({{3, 5}, {}, {0, 4}, {7}}, at::kDouble, /*extra=*/2);
  buffer.view(0).fill_(1);
  buffer.view(1).fill_(2);
  buffer.view(3).fill_(3);
  buffer.extra().fill_(4);
  EXPECT_EQ(buffer.view(0).sizes(), at::IntArrayRef({3, 5}));
  EXPECT_EQ(buffer.view(1).dim(), 0);
  EXPECT_EQ(buffer.view(2).numel(), 0);
  EXPECT_EQ(buffer.flat().sum().item<double>(), 15 + 2 + 21 + 8);
  for (size_t item = 0; item < buffer.num_items(); ++item) {
    EXPECT_EQ(buffer.offset(item) % FlatBuffer::kAlignment, 0);
  }
}

TEST(FlatBuffer, AViewMayBeAGradient) {
  FlatBuffer buffer({{4}}, at::kDouble);
  at::Tensor parameter = at::ones({4}, at::kDouble).requires_grad_();
  parameter.mutable_grad() = buffer.view(0);
  for (int micro = 0; micro < 2; ++micro) (parameter * 3).sum().backward();
  EXPECT_EQ(buffer.flat().sum().item<double>(), 24);
}

TEST(Slice, OverlapsOfAnyTwoBoxes) {
  const at::Tensor global = at::arange(60.).view({6, 10});
  const mesh::Box a{{0, 2}, {4, 5}};
  const mesh::Box b{{2, 0}, {4, 4}};
  at::Tensor target = at::full({4, 4}, -1.);
  EXPECT_EQ(copy_overlap(slice(global, a), a, target, b), 2 * 2);
  EXPECT_TRUE(at::equal(target.slice(0, 0, 2).slice(1, 2, 4),
                        global.slice(0, 2, 4).slice(1, 2, 4)));
  EXPECT_EQ((target == -1.).sum().item<int64_t>(), 12);
  const mesh::Box apart{{4, 8}, {2, 2}};
  EXPECT_EQ(
      copy_overlap(slice(global, a), a, slice(global, apart).clone(), apart),
      0);
}

}  // namespace
}  // namespace tessera::shard
