#include "tessera/comm/agree.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kRanks = 3;

// Late, as a disk is: the time-out counts for those that would wait.
TEST(Agree, WorkMayTakeLongerThanTheGroupWaits) {
  run_threads(
      kRanks, "shm",
      [&](Communicator& ranks) {
        const std::string complaint =
            first_complaint_of(ranks.world(), "working", [&] {
              if (ranks.rank() != 1) return;
              std::this_thread::sleep_for(seconds(3));
              TS_CHECK_IO(false, "a full disk");
            });
        EXPECT_EQ(complaint, "a full disk");
        EXPECT_EQ(first_complaint_of(ranks.world(), "working", [] {}), "");
      },
      seconds(2));
}

// By the code of the one that does, which the others name.
TEST(Agree, AllFailWhereOneDoes) {
  run_threads(kRanks, "shm", [&](Communicator& ranks) {
    const auto failure_with = [&](int64_t culprit) {
      try {
        on_all(ranks.world(), "working", [&] {
          TS_CHECK_CONFIG(ranks.rank() != culprit, "a wrong key");
        });
      } catch (const Error& error) {
        EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
        return message_of(error);
      }
      return std::string();
    };
    EXPECT_EQ(failure_with(-1), "");
    const std::string words =
        ranks.rank() == 1 ? "a wrong key" : "rank 1: a wrong key";
    EXPECT_TRUE(failure_with(1).ends_with(words));
  });
}

TEST(Agree, ARankThatEndsInItsWorkIsTold) {
  try {
    run_threads(
        kRanks, "shm",
        [&](Communicator& ranks) {
          first_complaint_of(ranks.world(), "working", [&] {
            TORCH_INTERNAL_ASSERT(ranks.rank() != 2, "rank 2 is broken");
            std::this_thread::sleep_for(milliseconds(500));
          });
        },
        seconds(2));
    FAIL();
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("rank 2 is broken"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace tessera::comm
