#include "tessera/data/detail/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::data::detail {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Progress, TellsNowAndThenWithTheTimeThatIsLeft) {
  double now = 100;
  ::testing::internal::CaptureStderr();
  Progress progress("reading", [&now] { return now; });
  const auto tell = [&](double at, double done) {
    now = at;
    progress.tell(done, 40, [done] {
      return std::to_string(static_cast<int>(done)) + " of 40";
    });
  };
  tell(104, 5);  // too soon
  tell(106, 10);
  tell(108, 30);  // too soon after
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("reading: 10 of 40 (25%), 18.0s left"));
  EXPECT_THAT(said, Not(HasSubstr("5 of 40")));
  EXPECT_THAT(said, Not(HasSubstr("30 of 40")));
  EXPECT_EQ(progress.seconds(), 8);
}

}  // namespace
}  // namespace tessera::data::detail
