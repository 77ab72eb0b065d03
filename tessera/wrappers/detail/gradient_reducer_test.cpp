#include "tessera/wrappers/detail/gradient_reducer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "tessera/comm/communicator.h"
#include "tessera/wrappers/distributed_data_parallel.h"

namespace tessera::wrappers {
namespace {

struct HalvesImpl : torch::nn::Module {
  HalvesImpl() {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor sum = first->forward(x).sum();
    if (has_second) sum = sum + second->forward(x).sum();
    return sum;
  }

  torch::nn::Linear first{3, 2}, second{3, 2};
  bool has_second = true;
};
TORCH_MODULE(Halves);

// The habit of other libraries: gradients are dropped behind the forward, and
// autograd makes new ones outside of the buckets. The last micro-batch does not
// come to all of them.
TEST(GradientReducer, SumsWhatOnlyAnEarlierMicrobatchReached) {
  constexpr int64_t kRanks = 2;
  std::vector<at::Tensor> gradients(kRanks);
  comm::run_threads(kRanks, "shm", [&](comm::Communicator& ranks) {
    Halves net;
    DistributedDataParallel ddp(net, ranks.world());
    const at::Tensor x = at::full({1, 3}, 1.0 + ranks.rank());
    net->zero_grad();
    at::Tensor loss = ddp.forward(x);
    net->zero_grad();
    ddp.accumulate(loss);
    net->has_second = false;
    ddp.backward(ddp.forward(x));
    gradients[ranks.rank()] = net->second->weight.grad().clone();
  });
  for (const at::Tensor& gradient : gradients) {
    EXPECT_TRUE(at::equal(gradient, at::full({2, 3}, 1.5))) << gradient;
  }
}

}  // namespace
}  // namespace tessera::wrappers
