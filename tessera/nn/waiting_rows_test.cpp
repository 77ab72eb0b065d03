#include "tessera/nn/waiting_rows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>
#include <vector>

#include "tessera/nn/matmul.h"
#include "tessera/nn/unwritten_gradients.h"
#include "tessera/nn/weight_queue.h"

namespace tessera::nn {
namespace {

constexpr double kJunk = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kRows = 8, kIn = 96, kOut = 64;

TEST(BatchesTogether, AreSoManyThatRowsAreEnoughAndNoMoreThanTheGradient) {
  const auto of = [](int64_t rows, int64_t in, int64_t out, int64_t batches) {
    return batches_together(rows, in, out, batches, at::kFloat);
  };
  EXPECT_EQ(of(64, 512, 8192, 100), 7);  // 448 of 481 rows
  EXPECT_EQ(of(64, 512, 512, 100), 4);
  EXPECT_EQ(of(64, 4096, 4096, 100), 8);
  EXPECT_EQ(of(64, 4096, 4096, 5), 5);
  EXPECT_EQ(of(128, 4096, 4096, 100), 4);
  EXPECT_EQ(of(129, 4096, 4096, 100), 1);
  EXPECT_EQ(of(128, 64, 64, 100), 1);
  EXPECT_EQ(of(1, 4096, 4096, 1), 1);
  EXPECT_EQ(of(0, 4096, 4096, 100), 1);
  EXPECT_EQ(of(16, 0, 64, 100), 1);
}

// Small products of fp16 are rounded to it before they are added.
TEST(BatchesTogether, OfHalfAreThoseOfProductsThatAreSummedWider) {
  EXPECT_EQ(batches_together(8, 64, 64, 4, at::kHalf), 1);
  EXPECT_EQ(batches_together(8, 64, 64, 4, at::kBFloat16), 4);
  EXPECT_EQ(batches_together(64, 512, 512, 4, at::kHalf), 4);
}

TEST(WaitingRows, AreGivenOutWhenTheyAreEnoughOrTheLast) {
  WaitingRows rows(/*batches=*/6);  // four at a time
  std::vector<int64_t> given;
  at::Tensor all_dy, all_x;
  std::vector<at::Tensor> dys, xs;
  for (int i = 0; i < 6; ++i) {
    dys.push_back(at::randn({kRows, kOut}));
    xs.push_back(at::randn({kRows, kIn}));
    const auto now = rows.add(dys.back(), xs.back());
    given.push_back(now ? now->x.size(0) : 0);
    if (!now) continue;
    EXPECT_TRUE(at::equal(now->dy, at::cat(dys)));
    EXPECT_TRUE(at::equal(now->x, at::cat(xs)));
    dys.clear();
    xs.clear();
  }
  EXPECT_EQ(given, std::vector<int64_t>({0, 0, 0, 4 * kRows, 0, 2 * kRows}));
  EXPECT_FALSE(rows.take());
}

TEST(WaitingRows, OfAnotherSizeThanTheFirstAreWelcomeWhereThereIsRoom) {
  WaitingRows rows(/*batches=*/7);
  const auto add = [&](int64_t count) {
    const auto now = rows.add(at::ones({count, kOut}), at::ones({count, kIn}));
    return now ? now->x.size(0) : 0;
  };
  EXPECT_EQ(add(8), 0);
  EXPECT_EQ(add(19), 27);  // no room for as many again
  EXPECT_EQ(add(8), 0);
  EXPECT_EQ(add(8), 0);
  EXPECT_EQ(add(19), 19);    // alone: no room
  EXPECT_EQ(add(200), 200);  // alone: large
  EXPECT_EQ(add(3), 19);     // the last, with those that waited
  EXPECT_EQ(add(3), 0);      // more than was said: as from the beginning
}

TEST(WaitingRows, AreForgottenByAReset) {
  WaitingRows rows(/*batches=*/6);
  EXPECT_FALSE(rows.add(at::ones({kRows, kOut}), at::ones({kRows, kIn})));
  rows.reset();
  EXPECT_FALSE(rows.take());
}

class GradientOfSmallBatches : public ::testing::TestWithParam<bool> {
 protected:
  // Of so many backwards, through one layer that is used `uses` times in each.
  void run(int64_t backwards, int64_t uses = 1) {
    for (int64_t i = 0; i < backwards; ++i) {
      const auto queue = c10::make_intrusive<WeightQueue>();
      std::vector<at::Tensor> ends, gradients;
      at::Tensor x = at::randn({kRows, kIn}, type_).requires_grad_();
      {
        const WeightQueue::Scope scope(queue);
        for (int64_t use = 0; use < uses; ++use) {
          const at::Tensor dy = at::randn({kRows, kOut}, type_);
          ends.push_back(linear_product(x, weight_));
          gradients.push_back(dy);
          wanted_ += at::mm(dy.to(at::kDouble).t(), x.detach().to(at::kDouble));
        }
      }
      if (GetParam()) {
        queue->put_off(ends, gradients, x, {weight_});
        queue->run();
      } else {
        torch::autograd::backward(ends, gradients);
      }
    }
  }
  void begin(at::ScalarType type, int64_t batches) {
    type_ = type;
    weight_ = at::randn({kOut, kIn}, type).requires_grad_();
    gradient_ = at::full({kOut, kIn}, kJunk,
                         type == at::kDouble ? at::kDouble : at::kFloat);
    weight_.mutable_grad() = gradient_;
    all_ = std::make_unique<UnwrittenGradients>(
        std::vector<at::Tensor>{weight_}, std::vector<at::Tensor>{gradient_},
        batches);
    restart();
  }
  void restart() {
    wanted_ = at::zeros({kOut, kIn}, at::kDouble);
    all_->begin(gradient_);
  }
  bool is_whole() const {
    return at::allclose(gradient_.to(at::kDouble), wanted_,
                        /*rtol=*/0,
                        type_ == at::kDouble  ? 1e-12
                        : type_ == at::kFloat ? 1e-4
                                              : 0.2);
  }

  at::ScalarType type_ = at::kDouble;
  at::Tensor weight_, gradient_, wanted_;
  std::unique_ptr<UnwrittenGradients> all_;
};

TEST_P(GradientOfSmallBatches, IsWholeBehindTheLast) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    begin(type, /*batches=*/6);
    for (int step = 0; step < 2; ++step) {
      run(3);
      EXPECT_FALSE(is_whole()) << "nothing waited, of " << type;
      run(3);
      EXPECT_TRUE(is_whole()) << type;
      all_->complete();
      EXPECT_TRUE(is_whole()) << type;
      restart();
    }
  }
}

TEST_P(GradientOfSmallBatches, IsWholeForWhoReadsItEarlier) {
  for (const int64_t before : {0, 1, 3, 4, 5}) {
    begin(at::kDouble, /*batches=*/9);
    run(before);
    all_->complete();
    EXPECT_TRUE(is_whole()) << before;
    run(9 - before);
    EXPECT_TRUE(is_whole()) << before;
  }
}

TEST_P(GradientOfSmallBatches, OfALayerThatIsUsedTwiceHasBoth) {
  begin(at::kDouble, /*batches=*/5);
  run(5, /*uses=*/2);
  all_->complete();
  EXPECT_TRUE(is_whole());
}

TEST_P(GradientOfSmallBatches, OfAStepThatWasGivenUpIsForgotten) {
  begin(at::kDouble, /*batches=*/6);
  run(3);
  restart();
  run(6);
  EXPECT_TRUE(is_whole());
}

TEST_P(GradientOfSmallBatches, HasWhatLibTorchAddsToo) {
  begin(at::kDouble, /*batches=*/6);
  run(3);
  torch::autograd::backward({weight_.sum()}, {});
  wanted_ += 1;
  run(3);
  EXPECT_TRUE(is_whole());
}

INSTANTIATE_TEST_SUITE_P(Backward, GradientOfSmallBatches, ::testing::Bool(),
                         [](const auto& each) {
                           return each.param ? "in_parts" : "whole";
                         });

}  // namespace
}  // namespace tessera::nn
