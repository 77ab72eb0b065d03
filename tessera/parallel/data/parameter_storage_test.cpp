#include "tessera/parallel/data/parameter_storage.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tessera::parallel::data
