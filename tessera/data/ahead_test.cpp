#include "tessera/data/ahead.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/core/ignore_index.h"

namespace tessera::data {
namespace {

constexpr int64_t kNone = kIgnoreIndex;

at::Tensor row(std::vector<int64_t> values) {
  return at::tensor(values, at::kLong).unsqueeze(0);
}

TEST(Ahead, MovesASampleAndEndsWithIt) {
  const Batch batch{row({1, 2, 3, 4}), row({2, 3, kNone, 5})};
  const at::Tensor inputs = inputs_ahead(batch, 2);
  EXPECT_TRUE(at::equal(inputs[0], row({2, 3, 4, 0})));
  EXPECT_TRUE(at::equal(inputs[1], row({3, 4, 0, 0})));
  const at::Tensor targets = targets_ahead(batch, 2);
  EXPECT_TRUE(at::equal(targets[0], row({3, kNone, 5, kNone})));
  EXPECT_TRUE(at::equal(targets[1], row({kNone, 5, kNone, kNone})));
}

TEST(Ahead, StaysInADocument) {
  const Batch batch{row({1, 2, 3, 4}), row({2, 3, 4, 5}), row({0, 0, 0, 3})};
  const at::Tensor targets = targets_ahead(batch, 2);
  EXPECT_TRUE(at::equal(targets[0], row({3, 4, kNone, kNone})));
  EXPECT_TRUE(at::equal(targets[1], row({4, kNone, kNone, kNone})));
}

TEST(Ahead, IsNothingBeyondASample) {
  const Batch batch{row({1, 2}), row({2, 3})};
  EXPECT_TRUE(at::equal(targets_ahead(batch, 3)[2], row({kNone, kNone})));
  EXPECT_TRUE(at::equal(inputs_ahead(batch, 3)[2], row({0, 0})));
}

}  // namespace
}  // namespace tessera::data
