#include "tessera/engine/kept_states.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/failure_of.h"

namespace tessera::engine {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;

TEST(KeptStates, ALossScaleIsReadAsItWasWritten) {
  const optim::LossScaleState written{
      .scale = 0.1, .finite_in_a_row = 7, .hysteresis_left = 2};
  const auto read = loss_scale_from(to_json(written), "here");
  EXPECT_EQ(read.scale, written.scale);
  EXPECT_EQ(read.finite_in_a_row, written.finite_in_a_row);
  EXPECT_EQ(read.hysteresis_left, written.hysteresis_left);
}

TEST(KeptStates, ALossScaleThatIsNoneIsRefused) {
  const auto said = [](const char* json) {
    return failure_of([&] { loss_scale_from(json, "step-3"); });
  };
  for (const char* scale : {"0", "-1"}) {
    EXPECT_THAT(said((std::string(R"({"finite_in_a_row": 0, )") +
                      R"("hysteresis_left": 1, "scale": )" + scale + "}")
                         .c_str()),
                HasSubstr("step-3: scale: it is " + std::string(scale) +
                          ", and must be above 0"));
  }
  EXPECT_THAT(said(R"({"scale": 1, "finite_in_a_row": 0})"),
              HasSubstr("step-3 lacks the key hysteresis_left"));
  EXPECT_THAT(said("[]"), HasSubstr("lacks the key scale"));
}

}  // namespace
}  // namespace tessera::engine
