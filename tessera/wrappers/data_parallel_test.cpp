#include "tessera/wrappers/data_parallel.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <barrier>
#include <mutex>
#include <set>
#include <thread>

#include "tessera/core/error.h"

namespace tessera::wrappers {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
namespace nn = torch::nn;

// Largest difference relative to the norm of what was expected.
double relative_error(const at::Tensor& found, const at::Tensor& expected) {
  return ((found - expected).norm() / expected.norm()).item<double>();
}

void clear_gradients(nn::Module& module) {
  for (at::Tensor& parameter : module.parameters()) {
    parameter.mutable_grad() = at::Tensor();
  }
}

std::vector<at::Tensor> gradients_of(nn::Module& module) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : module.parameters()) {
    gradients.push_back(parameter.grad().clone());
  }
  return gradients;
}

// Worked example: Linear(10, 1), 64 samples, MSE, SGD with 0.01. With S bytes
// of parameters, of 4 devices the first moves 3S in and out, the others S.
void expect_star(size_t devices) {
  at::manual_seed(5);
  nn::Linear alone(10, 1);
  alone->to(at::kDouble);
  nn::Linear trained(std::dynamic_pointer_cast<nn::LinearImpl>(alone->clone()));
  DataParallel model(trained, cpu_devices(devices));
  const int64_t parameter_bytes = 11 * 8;
  constexpr int kSteps = 10;
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor inputs = at::randn({64, 10}, at::kDouble);
    const at::Tensor targets = at::randn({64, 1}, at::kDouble);
    for (auto* linear : {&alone, &trained}) clear_gradients(**linear);
    at::mse_loss(alone->forward(inputs), targets).backward();
    at::mse_loss(model.forward(inputs), targets).backward();
    const at::NoGradGuard no_grad;
    for (auto* linear : {&alone, &trained}) {
      for (at::Tensor& parameter : (*linear)->parameters()) {
        parameter.sub_(parameter.grad(), 0.01);
      }
    }
    EXPECT_LT(relative_error(trained->weight, alone->weight), 1e-14);
    EXPECT_LT(relative_error(trained->bias, alone->bias), 1e-13);
  }
  const auto others = static_cast<int64_t>(devices - 1);
  const auto& traffic = model.traffic();
  EXPECT_EQ(traffic[0].model_in, others * parameter_bytes * kSteps);
  EXPECT_EQ(traffic[0].model_out, others * parameter_bytes * kSteps);
  for (size_t device = 1; device < devices; ++device) {
    EXPECT_EQ(traffic[device].model_in, parameter_bytes * kSteps);
    EXPECT_EQ(traffic[device].model_out, parameter_bytes * kSteps);
    // Inputs and the gradient of outputs in; outputs out.
    const auto rows = 64 / static_cast<int64_t>(devices);
    EXPECT_EQ(traffic[device].batch_in, rows * (10 + 1) * 8 * kSteps);
    EXPECT_EQ(traffic[device].batch_out, rows * 8 * kSteps);
  }
}

TEST(DataParallel, TheStarOfTwoAndFourDevicesEqualsOneStepByStep) {
  expect_star(2);
  expect_star(4);
}

nn::Sequential make_net() {
  nn::Sequential net(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 3));
  net->to(at::kDouble);
  return net;
}

// Output, gradients of parameters and of the input, whatever the batch leaves
// for the last device or for all.
TEST(DataParallel, EqualsOneDeviceForAnyBatchAndNumberOfDevices) {
  at::manual_seed(6);
  nn::Sequential net = make_net();
  for (const size_t devices : {1, 2, 3, 4, 7}) {
    DataParallel model(net, cpu_devices(devices));
    for (const int64_t samples : {1, 2, 3, 10, 16}) {
      const at::Tensor weights = at::randn({samples, 3}, at::kDouble);
      at::Tensor input = at::randn({samples, 6}, at::kDouble).requires_grad_();
      const at::Tensor expected = net->forward(input);
      (expected * weights).sum().backward();
      const auto gradients = gradients_of(*net);
      const at::Tensor input_gradient = input.grad().clone();
      clear_gradients(*net);
      input.mutable_grad() = at::Tensor();

      const at::Tensor output = model.forward(input);
      (output * weights).sum().backward();
      EXPECT_LT(relative_error(output, expected), 1e-14);
      EXPECT_LT(relative_error(input.grad(), input_gradient), 1e-14);
      const auto found = gradients_of(*net);
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_LT(relative_error(found[i], gradients[i]), 1e-13);
      }
      clear_gradients(*net);
    }
  }
}

// Worked example: [1000, 512] in chunks, each times the same [512, 256].
TEST(DataParallel, ChunksOfAProductAreItsRows) {
  at::manual_seed(7);
  const nn::Linear product(nn::LinearOptions(512, 256).bias(false));
  const at::Tensor a = at::randn({1000, 512});
  for (const std::vector<int64_t>& rows :
       {std::vector<int64_t>{500, 500}, std::vector<int64_t>{334, 334, 332}}) {
    DataParallel model(product, cpu_devices(rows.size()));
    const at::Tensor output = model.forward(a);
    EXPECT_EQ(output.sizes(), (std::vector<int64_t>{1000, 256}));
    EXPECT_LT(relative_error(output, product->weight.mm(a.t()).t()), 1e-6);
    for (size_t device = 1; device < rows.size(); ++device) {
      const auto& moved = model.traffic()[device];
      EXPECT_EQ(moved.batch_in, rows[device] * 512 * 4);
      EXPECT_EQ(moved.batch_out, rows[device] * 256 * 4);
    }
  }
}

// Two tensors, a number and a mask that is not there; two outputs, one of them
// without gradient; a parameter that is tied, one unused, one frozen.
struct OddImpl : nn::Cloneable<OddImpl> {
  OddImpl() { reset(); }
  void reset() override {
    const auto options = at::TensorOptions(at::kDouble);
    weight = register_parameter("weight", at::randn({4, 4}, options));
    tied = register_parameter("tied", weight);
    unused = register_parameter("unused", at::ones({2}, options));
    frozen = register_parameter("frozen", at::ones({4}, options), false);
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x,
                                             const at::Tensor& scale,
                                             double factor,
                                             const at::Tensor& mask) {
    EXPECT_FALSE(mask.defined());
    const at::Tensor y = x.mm(weight).tanh().mm(tied) * frozen * factor * scale;
    return {y, y.argmax(-1)};
  }
  at::Tensor weight, tied, unused, frozen;
};
TORCH_MODULE(Odd);

TEST(DataParallel, TakesModulesOfAnyForm) {
  at::manual_seed(7);
  Odd odd;
  const at::Tensor x = at::randn({9, 4}, at::kDouble);
  // Goes whole to all devices.
  at::Tensor scale = at::scalar_tensor(1.5, at::kDouble).requires_grad_();
  const auto expected = odd->forward(x, scale, 2.0, {});
  std::get<0>(expected).square().sum().backward();
  const at::Tensor weight_gradient = odd->weight.grad().clone();
  const at::Tensor scale_gradient = scale.grad().clone();
  clear_gradients(*odd);
  scale.mutable_grad() = at::Tensor();

  DataParallel model(odd, cpu_devices(4));
  const auto found = model.forward(x, scale, 2.0, at::Tensor());
  EXPECT_TRUE(at::equal(std::get<1>(found), std::get<1>(expected)));
  EXPECT_FALSE(std::get<1>(found).requires_grad());
  std::get<0>(found).square().sum().backward();
  EXPECT_LT(relative_error(odd->weight.grad(), weight_gradient), 1e-14);
  EXPECT_LT(relative_error(scale.grad(), scale_gradient), 1e-14);
  EXPECT_FALSE(odd->unused.grad().defined());
  EXPECT_FALSE(odd->frozen.grad().defined());
}

// A module without clone() comes with a function that builds one like it.
struct PlainImpl : nn::Module {
  explicit PlainImpl(int64_t width = 3) {
    linear = register_module("linear", nn::Linear(width, 2));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  nn::Linear linear{nullptr};
};

TEST(DataParallel, BuildsReplicasOfAModuleWithoutClone) {
  const auto plain = std::make_shared<PlainImpl>();
  DataParallel model(plain, cpu_devices(3),
                     [] { return std::make_shared<PlainImpl>(); });
  const at::Tensor x = at::randn({7, 3}, at::kDouble);
  EXPECT_LT(relative_error(model.forward(x), plain->forward(x)), 1e-14);
  const auto wrong = [&] {
    DataParallel other(plain, cpu_devices(2),
                       [] { return std::make_shared<PlainImpl>(5); });
  };
  EXPECT_THAT(wrong, ThrowsMessage<Error>(HasSubstr(
                         "device 1 has 'linear.weight' [2, 5] where")));
}

// As one device would after the first slice alone; the others' are dropped.
TEST(DataParallel, KeepsTheBuffersOfDevice0AndFollowsItsModes) {
  at::manual_seed(8);
  nn::Sequential net(nn::Linear(4, 5), nn::BatchNorm1d(5));
  net->to(at::kDouble);
  auto alone = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
  DataParallel model(net, cpu_devices(2));
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = at::randn({8, 4}, at::kDouble);
    model.forward(x);
    alone->forward(x.slice(0, 0, 4));
  }
  const auto found = net->named_buffers();
  for (const auto& expected : alone->named_buffers()) {
    EXPECT_TRUE(at::equal(found[expected.key()], expected.value()));
  }
  net->eval();
  alone->eval();
  const at::Tensor x = at::randn({5, 4}, at::kDouble);
  EXPECT_LT(relative_error(model.forward(x), alone->forward(x)), 1e-14);
}

TEST(DataParallel, TwoForwardsMayPrecedeABackward) {
  at::manual_seed(9);
  nn::Sequential net = make_net();
  DataParallel model(net, cpu_devices(3));
  const at::Tensor x = at::randn({7, 6}, at::kDouble);
  net->forward(x).square().sum().backward();
  const auto once = gradients_of(*net);
  clear_gradients(*net);
  const at::Tensor first = model.forward(x), second = model.forward(x);
  (first * second).sum().backward();  // d(yy) = 2 y dy, as of the square
  const auto found = gradients_of(*net);
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_LT(relative_error(found[i], once[i]), 1e-13);
  }
}

TEST(DataParallel, ASecondBackwardNeedsTheGraphKept) {
  nn::Sequential net = make_net();
  DataParallel model(net, cpu_devices(2));
  const at::Tensor loss = model.forward(at::randn({4, 6}, at::kDouble)).sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = gradients_of(*net);
  loss.backward();
  EXPECT_LT(relative_error(gradients_of(*net)[0], 2 * once[0]), 1e-14);
  EXPECT_THROW(loss.backward(), c10::Error);
  const at::Tensor again = model.forward(at::randn({4, 6}, at::kDouble)).sum();
  EXPECT_THAT(
      [&] {
        torch::autograd::grad({again}, net->parameters(), {}, {},
                              /*create_graph=*/true);
      },
      ThrowsMessage<c10::Error>(HasSubstr("second derivatives")));
}

TEST(DataParallel, RecordsNothingWithoutGradMode) {
  nn::Sequential net = make_net();
  DataParallel model(net, cpu_devices(2));
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(model.forward(at::randn({4, 6}, at::kDouble)).requires_grad());
}

// Each device's backward waits for all others: only at once can they end.
struct MeetingImpl : nn::Cloneable<MeetingImpl> {
  explicit MeetingImpl(std::barrier<>* meeting) : meeting(meeting) { reset(); }
  void reset() override {
    linear = register_module("linear", nn::Linear(2, 2));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto meet = [this] {
      meeting->arrive_and_wait();
      const std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
      ranks.insert(rank_context().rank);
    };
    meet();
    at::Tensor y = linear->forward(x);
    y.register_hook([meet](const at::Tensor& gradient) {
      meet();
      return gradient;
    });
    return y;
  }
  std::barrier<>* meeting;
  nn::Linear linear{nullptr};
  inline static std::mutex mutex;
  inline static std::set<std::thread::id> threads;
  inline static std::set<int> ranks;
};
TORCH_MODULE(Meeting);

TEST(DataParallel, DevicesRunForwardAndBackwardAtOnceInThreadsOfTheirOwn) {
  std::barrier meeting(3);
  DataParallel model(Meeting(&meeting), cpu_devices(3));
  const RankContextGuard rank(
      {.rank = 4, .world_size = 8, .coords = "", .step = 1});
  model.forward(at::randn({6, 2})).sum().backward();
  EXPECT_EQ(MeetingImpl::threads.size(), 3);
  EXPECT_THAT(MeetingImpl::ranks, ::testing::ElementsAre(4));
}

struct FailingImpl : nn::Cloneable<FailingImpl> {
  void reset() override {}
  at::Tensor forward(const at::Tensor& x, bool in_backward) {
    const bool fails = x.min().item<double>() < 0;
    TS_CHECK_IO(!fails || in_backward, "a negative sample");
    at::Tensor y = x * 2;
    if (fails) {
      y.register_hook([](const at::Tensor&) {
        return std::vector<at::Tensor>().at(7);  // no c10::Error
      });
    }
    return y;
  }
};
TORCH_MODULE(Failing);

TEST(DataParallel, NamesTheDeviceOfAFailureAndGoesOn) {
  DataParallel model(Failing(), cpu_devices(3));
  at::Tensor x = at::ones({6, 1}, at::kDouble);
  x[4] = -1;
  x.requires_grad_();
  try {
    model.forward(x, false);
    FAIL() << "the negative sample went unseen";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("a negative sample"));
    EXPECT_THAT(error.what(), HasSubstr("on device 2 of 3 (cpu)"));
    EXPECT_EQ(error.exit_code(), ExitCode::kInputOutput);
  }
  const at::Tensor output = model.forward(x, true);
  EXPECT_THAT([&] { output.sum().backward(); },
              ThrowsMessage<std::exception>(::testing::AllOf(
                  HasSubstr("range_check"), HasSubstr("on device 2 of 3"))));
  const at::Tensor good = at::ones({6, 1}, at::kDouble);
  EXPECT_TRUE(at::equal(model.forward(good, false), good * 2));
}

struct MeanImpl : nn::Cloneable<MeanImpl> {
  void reset() override {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) {
    return (x - y).mean();
  }
};
TORCH_MODULE(Mean);

TEST(DataParallel, RefusesWhatWouldBeWrong) {
  DataParallel model(Mean(), cpu_devices(2));
  const at::Tensor x = at::ones({4});
  EXPECT_THAT([&] { model.forward(x, x); },
              ThrowsMessage<Error>(HasSubstr("a tensor without dims")));
  EXPECT_THAT([&] { model.forward(x, at::ones({3})); },
              ThrowsMessage<Error>(HasSubstr("inputs of 4 and 3 samples")));
  EXPECT_THAT([&] { model.forward(at::ones({}), at::ones({})); },
              ThrowsMessage<Error>(HasSubstr("no tensor to cut")));
  EXPECT_THAT([] { DataParallel none(Mean(), cpu_devices(0)); },
              ThrowsMessage<Error>(HasSubstr("no device")));
}

// As the trainer does it: slices of micro-batches, each divided by the weight
// of all, into gradients that lie in one flat buffer.
TEST(Replicas, SumsOfSlicesEqualOneDevice) {
  at::manual_seed(10);
  nn::Sequential net = make_net();
  const at::Tensor inputs = at::randn({2, 10, 6}, at::kDouble);
  (net->forward(inputs.view({20, 6})).square().sum() / 60).backward();
  const auto expected = gradients_of(*net);

  std::vector<Replicas::ModulePtr> modules = {net.ptr()};
  for (int device = 1; device < 4; ++device) modules.push_back(net->clone());
  Replicas replicas(modules, cpu_devices(4));
  at::Tensor flat = at::zeros({1000}, at::kDouble);
  int64_t offset = 0;
  for (at::Tensor parameter : net->parameters()) {
    parameter.mutable_grad() =
        flat.slice(0, offset, offset + parameter.numel()).view_as(parameter);
    offset += parameter.numel();
  }
  for (int step = 0; step < 3; ++step) {
    flat.zero_();
    replicas.replicate();
    for (int64_t micro = 0; micro < 2; ++micro) {
      replicas.run(4, [&](size_t device) {
        const auto first = static_cast<int64_t>(3 * device);
        auto& own = static_cast<nn::SequentialImpl&>(*modules[device]);
        const at::Tensor slice = inputs[micro].slice(0, first, first + 3);
        (own.forward(slice).square().sum() / 60).backward();
      });
    }
    replicas.reduce_gradients();
    for (size_t i = 0; i < expected.size(); ++i) {
      const at::Tensor gradient = net->parameters()[i].grad();
      EXPECT_LT(relative_error(gradient, expected[i]), 1e-13);
      EXPECT_TRUE(gradient.is_alias_of(flat));
    }
  }
  const int64_t bytes = offset * 8;
  EXPECT_EQ(replicas.traffic()[0].model_in, 3 * 3 * bytes);
  EXPECT_EQ(replicas.traffic()[0].model_out, 3 * 3 * bytes);
  EXPECT_EQ(replicas.traffic()[2].model_in, 3 * bytes);
  EXPECT_EQ(replicas.traffic()[2].model_out, 3 * bytes);
}

}  // namespace
}  // namespace tessera::wrappers
