#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/comm/flat_buffer.h"

namespace tessera::comm {
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
  for (size_t item = 0; item < 4; ++item) {
    EXPECT_EQ(buffer.view(item).storage_offset() % FlatBuffer::kAlignment, 0);
  }
}

TEST(FlatBuffer, AViewMayBeAGradient) {
  FlatBuffer buffer({{4}}, at::kDouble);
  at::Tensor parameter = at::ones({4}, at::kDouble).requires_grad_();
  parameter.mutable_grad() = buffer.view(0);
  for (int micro = 0; micro < 2; ++micro) (parameter * 3).sum().backward();
  EXPECT_EQ(buffer.flat().sum().item<double>(), 24);
}

}  // namespace
}  // namespace tessera::comm
