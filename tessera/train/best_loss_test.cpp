#include "tessera/train/best_loss.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace tessera::train {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

std::optional<BestLoss> after(const std::vector<double>& losses) {
  std::optional<BestLoss> best;
  for (size_t i = 0; i < losses.size(); ++i) {
    best = with_validation(best, losses[i], static_cast<int64_t>(i + 1));
  }
  return best;
}

TEST(BestLoss, IsTheLowestAndCountsWhatCameAfter) {
  const auto best = after({3, 2, 2.5, 2});
  EXPECT_EQ(best->loss, 2);
  EXPECT_EQ(best->step, 2);
  EXPECT_EQ(best->since, 2);
}

// Of a run that has nothing else: patience ends it too.
TEST(BestLoss, NoNumberIsNeverLower) {
  EXPECT_EQ(after({kNone, kNone, kNone})->since, 2);
  EXPECT_EQ(after({kNone, kNone, 5, kNone})->step, 3);
  EXPECT_EQ(after({5, kNone, kNone})->since, 2);
}

}  // namespace
}  // namespace tessera::train
