#include "tessera/core/log.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdlib>
#include <regex>

#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::log {
namespace {

void set_most_bytes_of_a_file(rlim_t bytes) {
  rlimit limit{};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = bytes;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
}

// As on a full disk: what does not fit is left out, however much it is, and
// what comes when there is room again stands on a line of its own.
TEST(Log, LinesThatFindNoRoomAreLeftOut) {
  const TemporaryFolder folder;
  const std::string path = folder.file("log");
  const auto write_much = [&] {
    std::signal(SIGXFSZ, SIG_IGN);
    rank_context().rank = 0;
    open_rank_file(0, path);
    set_most_bytes_of_a_file(10'000);
    for (int line = 0; line < 2000; ++line) note("one of many lines");
    set_most_bytes_of_a_file(RLIM_INFINITY);
    note("there is room again");
    close_rank_file(0);
    std::exit(0);
  };
  EXPECT_EXIT(write_much(), testing::ExitedWithCode(0), "");
  const std::string text = read_file(path);
  EXPECT_GT(text.size(), 10'000U);
  EXPECT_LT(text.size(), 10'100U);
  const size_t last = text.rfind('\n', text.size() - 2);
  EXPECT_NE(text.find("there is room again\n", last), std::string::npos);
  EXPECT_EQ(text.find("one of many", last), std::string::npos);
}

TEST(Log, AFileHasDateAndZoneToo) {
  const TemporaryFolder folder;
  const std::string path = folder.file("log");
  const RankContextGuard as({.rank = 0});
  open_rank_file(0, path);
  ::testing::internal::CaptureStderr();
  warning("a word");
  const std::string shown = ::testing::internal::GetCapturedStderr();
  close_rank_file(0);
  const std::string of_day = "[0-9]{2}:[0-9]{2}:[0-9]{2}";
  EXPECT_TRUE(
      std::regex_match(shown, std::regex(of_day + " warning: a word\n")))
      << shown;
  const std::string text = read_file(path);
  EXPECT_TRUE(
      std::regex_match(text, std::regex("[0-9]{4}-[0-9]{2}-[0-9]{2} " + of_day +
                                        "[+-][0-9]{4} warning: a word\n")))
      << text;
}

}  // namespace
}  // namespace tessera::log
