#include "tessera/mesh/slice.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::mesh {
namespace {

TEST(Slice, CopiesTheOverlapOfTwoBoxes) {
  const at::Tensor global = at::arange(60.).view({6, 10});
  const Box a{{0, 2}, {4, 5}};
  const Box b{{2, 0}, {4, 4}};
  const at::Tensor source = slice(global, a).clone();
  const at::Tensor target = at::full({4, 4}, -1.);
  const Box common = intersect(a, b);
  EXPECT_EQ(common.numel(), 2 * 2);
  slice(target, relative(common, b)).copy_(slice(source, relative(common, a)));
  EXPECT_TRUE(at::equal(target.slice(0, 0, 2).slice(1, 2, 4),
                        global.slice(0, 2, 4).slice(1, 2, 4)));
  EXPECT_EQ((target == -1.).sum().item<int64_t>(), 12);
  EXPECT_TRUE(intersect(a, Box{{4, 8}, {2, 2}}).empty());
}

}  // namespace
}  // namespace tessera::mesh
