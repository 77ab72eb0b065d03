#include "tessera/launch/store.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <system_error>
#include <thread>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tests/support/listener.h"

namespace tessera::launch {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::Listener;
using ::testing::Not;
using ::testing::StartsWith;

uint16_t free_port() { return Listener(false).port; }

RankEnvironment tcp(int64_t rank, int64_t world_size, uint16_t port) {
  RankEnvironment here;
  here.rank = rank;
  here.world_size = world_size;
  here.local_rank = here.local_world_size = here.node = -1;
  here.source = "torchrun";
  here.rendezvous.kind = Rendezvous::Kind::kTcp;
  here.rendezvous.host = "127.0.0.1";
  here.rendezvous.port = port;
  return here;
}

RankEnvironment in_file(int64_t rank, int64_t world_size,
                        const std::string& file) {
  RankEnvironment here = tcp(rank, world_size, /*port=*/0);
  here.rendezvous.kind = Rendezvous::Kind::kFile;
  here.rendezvous.file = file;
  return here;
}

struct Outcome {
  std::optional<Meeting> meeting;
  std::string message;
  ExitCode code = ExitCode::kOk;
};

Outcome try_join(const RankEnvironment& here) {
  Outcome outcome;
  try {
    outcome.meeting = join(here);
  } catch (const Error& error) {
    outcome.message = error.what_without_backtrace();
    outcome.code = error.exit_code();
  }
  return outcome;
}

// Each environment joins on a thread of its own.
std::vector<Outcome> join_all(const std::vector<RankEnvironment>& all) {
  std::vector<Outcome> outcomes(all.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < all.size(); ++i) {
    threads.emplace_back([&, i] { outcomes[i] = try_join(all[i]); });
  }
  for (auto& thread : threads) thread.join();
  return outcomes;
}

// The local addresses on which this host listens at `port`, as the kernel
// prints them.
std::vector<std::string> listening_at(uint16_t port) {
  char suffix[8];
  std::snprintf(suffix, sizeof suffix, ":%04X", port);
  std::vector<std::string> found;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream lines(table);
    std::string line, number, local, remote, state;
    while (std::getline(lines, line)) {
      std::istringstream(line) >> number >> local >> remote >> state;
      if (state == "0A" && local.ends_with(suffix)) found.push_back(local);
    }
  }
  return found;
}

TEST(Store, OneRankNeedsNobody) {
  const Meeting meeting = join(RankEnvironment{});
  meeting.store->set("key", "value");
  EXPECT_EQ(meeting.store->get_to_str("key"), "value");
}

// c10d reads such a file again and again: its thread ends with the process.
TEST(Store, AFileOfSomethingElseIsGivenUp) {
  const TemporaryFolder folder;
  write_file_atomic(folder.file("junk"), std::string(4096, 'x'));
  const pid_t rank = fork();
  if (rank == 0) {
    RankEnvironment here;
    here.world_size = 2;
    here.join_timeout = std::chrono::seconds(1);
    here.rendezvous.kind = Rendezvous::Kind::kFile;
    here.rendezvous.file = folder.file("junk");
    _exit(static_cast<int>(try_join(here).code));
  }
  int status = 0;
  ASSERT_EQ(waitpid(rank, &status, 0), rank);
  EXPECT_EQ(WEXITSTATUS(status), static_cast<int>(ExitCode::kUnreachable));
}

// A file that holds a token of the job.
std::string token_file(const TemporaryFolder& folder, const char* name,
                       char letter) {
  write_file_atomic(folder.file(name), std::string(32, letter));
  chmod(folder.file(name).c_str(), 0600);
  return folder.file(name);
}

// Of a job with a token, and of one without.
class AnyTcpStore : public ::testing::TestWithParam<bool> {
 protected:
  RankEnvironment with_or_without(int64_t rank, int64_t world_size,
                                  uint16_t port) const {
    RankEnvironment here = tcp(rank, world_size, port);
    if (GetParam()) here.rendezvous.token_file = token_;
    return here;
  }

 private:
  const TemporaryFolder folder_;
  const std::string token_ = token_file(folder_, "token", 'a');
};
INSTANTIATE_TEST_SUITE_P(Store, AnyTcpStore, ::testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "token" : "no_token";
                         });

TEST_P(AnyTcpStore, RanksMeetOverTcpAndFindOutWhoIsNear) {
  const uint16_t port = free_port();
  auto outcomes =
      join_all({with_or_without(0, 3, port), with_or_without(1, 3, port),
                with_or_without(2, 3, port)});
  for (int64_t rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(outcomes[rank].meeting) << outcomes[rank].message;
    const RankEnvironment& here = outcomes[rank].meeting->environment;
    EXPECT_EQ(here.local_rank, rank);
    EXPECT_EQ(here.local_world_size, 3);
    EXPECT_EQ(here.node, 0);
    EXPECT_EQ(outcomes[rank].meeting->address, "127.0.0.1");
  }
  outcomes[2].meeting->store->set("from", "two");
  EXPECT_EQ(outcomes[1].meeting->store->get_to_str("from"), "two");
}

// As torchrun's agents count for themselves how often they started ranks.
TEST(Store, RanksOfAgentsThatCountOtherwiseMeet) {
  const std::string port = std::to_string(free_port());
  std::vector<RankEnvironment> all;
  for (const char* number : {"0", "1"}) {
    all.push_back(discover({{"RANK", number},
                            {"WORLD_SIZE", "2"},
                            {"MASTER_ADDR", "127.0.0.1"},
                            {"MASTER_PORT", port},
                            {"TORCHELASTIC_USE_AGENT_STORE", "False"},
                            {"TORCHELASTIC_RESTART_COUNT", number},
                            {"TESSERA_JOIN_TIMEOUT_S", "5"}}));
  }
  for (const Outcome& outcome : join_all(all)) {
    EXPECT_TRUE(outcome.meeting) << outcome.message;
  }
}

TEST_P(AnyTcpStore, ListensOnTheAddressThatWasAskedForAlone) {
  const uint16_t port = free_port();
  auto outcomes =
      join_all({with_or_without(0, 2, port), with_or_without(1, 2, port)});
  ASSERT_TRUE(outcomes[0].meeting) << outcomes[0].message;
  char expected[16];
  std::snprintf(expected, sizeof expected, "0100007F:%04X", port);
  EXPECT_THAT(listening_at(port), ::testing::ElementsAre(expected));
}

TEST(Store, RanksOfOneHostMeetInAFileWithoutAName) {
  const int fd = memfd_create("store", 0);
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  std::vector<pid_t> children;
  for (int64_t rank = 0; rank < 3; ++rank) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    Outcome outcome = try_join(in_file(rank, 3, path));
    if (!outcome.meeting) _exit(1);
    auto& store = *outcome.meeting->store;
    store.set("said/" + std::to_string(rank), std::to_string(10 * rank));
    const std::string next = "said/" + std::to_string((rank + 1) % 3);
    _exit(store.get_to_str(next) == std::to_string(10 * ((rank + 1) % 3)) ? 0
                                                                          : 2);
  }
  for (pid_t child : children) {
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  close(fd);
}

// Longer than rank 0 waits in one piece.
TEST(Store, ARankThatComesLateToAFileIsWaitedFor) {
  const int fd = memfd_create("store", 0);
  RankEnvironment first = in_file(0, 2, "/proc/self/fd/" + std::to_string(fd));
  first.join_timeout = std::chrono::seconds(6);
  const pid_t late = fork();
  if (late == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3500));
    RankEnvironment second = first;
    second.rank = 1;
    _exit(static_cast<int>(try_join(second).code));
  }
  ::testing::internal::CaptureStderr();
  const Outcome outcome = try_join(first);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("rank 1 of 2 did not come yet"));
  EXPECT_TRUE(outcome.meeting) << outcome.message;
  int status = -1;
  EXPECT_EQ(waitpid(late, &status, 0), late);
  EXPECT_EQ(status, 0);
  close(fd);
}

TEST_P(AnyTcpStore, ListsTheRanksThatDidNotCome) {
  const uint16_t port = free_port();
  std::vector<RankEnvironment> all = {with_or_without(0, 5, port),
                                      with_or_without(3, 5, port)};
  for (auto& here : all) here.join_timeout = std::chrono::seconds(2);
  ::testing::internal::CaptureStderr();
  const auto outcomes = join_all(all);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("ranks 1, 2, 4 of 5 did not come yet"));
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code, ExitCode::kUnreachable);
    EXPECT_THAT(outcome.message,
                HasSubstr("s ranks 1, 2, 4 of 5 did not come."));
  }
}

TEST(Store, RanksWithoutTheTokenOrWithAnotherAreNotOfTheJob) {
  const TemporaryFolder folder;
  const uint16_t port = free_port();
  std::vector<RankEnvironment> all = {tcp(0, 4, port), tcp(1, 4, port),
                                      tcp(2, 4, port), tcp(3, 4, port)};
  for (auto& here : all) here.join_timeout = std::chrono::seconds(2);
  all[0].rendezvous.token_file = token_file(folder, "token", 'a');
  all[1].rendezvous.token_file = token_file(folder, "other", 'b');
  all[3].rendezvous.token_file = folder.file("missing");
  const auto outcomes = join_all(all);
  EXPECT_THAT(outcomes[0].message, HasSubstr("ranks 1, 2, 3 of 4"));
  EXPECT_THAT(outcomes[1].message, HasSubstr("does not know this job's token"));
  EXPECT_THAT(outcomes[2].message, HasSubstr("a token that this rank has not"));
  EXPECT_EQ(outcomes[3].code, ExitCode::kConfig);
  EXPECT_THAT(outcomes[3].message,
              HasSubstr("Every host needs the job's token"));
}

TEST(Store, SaysSoWhenNobodyListens) {
  RankEnvironment here = tcp(1, 2, free_port());
  here.join_timeout = std::chrono::seconds(1);
  const Outcome outcome = try_join(here);
  EXPECT_EQ(outcome.code, ExitCode::kUnreachable);
  EXPECT_THAT(outcome.message, HasSubstr("no rendezvous at 127.0.0.1:"));
}

TEST(Store, SaysSoWhenSomethingMuteListens) {
  const Listener mute(true);
  RankEnvironment here = tcp(1, 2, mute.port);
  here.join_timeout = std::chrono::seconds(1);
  const Outcome outcome = try_join(here);
  EXPECT_EQ(outcome.code, ExitCode::kUnreachable);
  EXPECT_THAT(outcome.message, HasSubstr("another program holds the port"));
}

TEST(Store, SaysSoWhenThePortIsTaken) {
  const Listener other(true);
  const Outcome outcome = try_join(tcp(0, 2, other.port));
  EXPECT_EQ(outcome.code, ExitCode::kUnreachable);
  EXPECT_THAT(outcome.message, HasSubstr("held by another process"));
}

TEST(Store, SaysSoWhenTheHostHasNoAddress) {
  RankEnvironment here = tcp(0, 2, 12345);
  here.rendezvous.host = "no-such-host.invalid";
  const Outcome outcome = try_join(here);
  EXPECT_EQ(outcome.code, ExitCode::kUnreachable);
  EXPECT_THAT(outcome.message, HasSubstr("MASTER_ADDR=no-such-host.invalid"));
}

TEST(Store, ASecondRankOfOneNumberIsRefusedAndTheFirstStays) {
  const uint16_t port = free_port();
  std::vector<RankEnvironment> all = {tcp(0, 3, port), tcp(1, 3, port),
                                      tcp(1, 3, port)};
  for (auto& here : all) here.join_timeout = std::chrono::seconds(2);
  const auto outcomes = join_all(all);
  const bool second_refused = outcomes[2].code == ExitCode::kConfig;
  const Outcome& refused = outcomes[second_refused ? 2 : 1];
  const Outcome& kept = outcomes[second_refused ? 1 : 2];
  EXPECT_THAT(refused.message, HasSubstr("rank 1 is there already ("));
  EXPECT_THAT(kept.message, HasSubstr("rank 2 of 3 did not come"));
}

TEST_P(AnyTcpStore, RanksThatWereToldOfDifferentWorldsAreRefused) {
  const uint16_t port = free_port();
  std::vector<RankEnvironment> all = {with_or_without(0, 2, port),
                                      with_or_without(1, 3, port)};
  for (auto& here : all) here.join_timeout = std::chrono::seconds(2);
  const auto outcomes = join_all(all);
  EXPECT_THAT(outcomes[0].message + outcomes[1].message,
              AnyOf(HasSubstr("a world of 3 ranks, its peers of one of 2"),
                    HasSubstr("a world of 2 ranks, its peers of one of 3")));
}

// The first rank of a host of its own.
RankEnvironment alone_on_host(int64_t rank, int64_t world_size, uint16_t port) {
  RankEnvironment here = tcp(rank, world_size, port);
  here.local_rank = 0;
  here.local_world_size = 1;
  here.node = rank;
  return here;
}

// In /etc/hosts upper and lower case are one: a name for 127.0.0.1 that is not
// "localhost". Where no route leads out of this host, there is no address.
TEST(Store, ANameOfTheLoopbackHidesNoHost) {
  const uint16_t port = free_port();
  std::vector<RankEnvironment> all = {alone_on_host(0, 2, port),
                                      alone_on_host(1, 2, port)};
  for (auto& here : all) here.rendezvous.host = "LOCALHOST";
  const Outcome rank0 = join_all(all)[0];
  if (!rank0.meeting) {
    EXPECT_EQ(rank0.code, ExitCode::kConfig);
    EXPECT_THAT(rank0.message, HasSubstr("MASTER_ADDR=LOCALHOST is a loopback "
                                         "address on "));
    return;
  }
  EXPECT_THAT(rank0.meeting->address, Not(StartsWith("127.")));
  EXPECT_THAT(listening_at(port), Each(StartsWith("00000000")));
}

// Of ranks that have met: to meet within it would be chance, as c10d asks a
// rendezvous that is not there yet again after up to 1.5 s.
constexpr auto kPatience = std::chrono::seconds(1);

using Work = std::function<void(int64_t rank)>;

Outcome try_to_begin(const RankEnvironment& here, const Work& prepare,
                     const Work& begin) {
  Outcome outcome = try_join(here);
  if (!outcome.meeting) return outcome;
  outcome.meeting->environment.join_timeout = kPatience;
  try {
    begin_together(
        *outcome.meeting, [&] { prepare(here.rank); },
        [&] { begin(here.rank); });
  } catch (const Error& error) {
    outcome.message = error.what_without_backtrace();
    outcome.code = error.exit_code();
  }
  return outcome;
}

std::vector<Outcome> begin_all(const std::vector<RankEnvironment>& all,
                               const Work& prepare, const Work& begin) {
  std::vector<Outcome> outcomes(all.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < all.size(); ++i) {
    threads.emplace_back(
        [&, i] { outcomes[i] = try_to_begin(all[i], prepare, begin); });
  }
  for (auto& thread : threads) thread.join();
  return outcomes;
}

void nothing(int64_t) {}

TEST(BeginTogether, AllWaitAsLongAsOneOfThemPrepares) {
  const uint16_t port = free_port();
  const std::vector<RankEnvironment> all = {alone_on_host(0, 3, port),
                                            alone_on_host(1, 3, port),
                                            alone_on_host(2, 3, port)};
  std::atomic<bool> is_prepared = false;
  std::atomic<int> begun_too_early = 0, begun = 0;
  const auto outcomes = begin_all(
      all,
      [&](int64_t rank) {
        if (rank != 1) return;
        std::this_thread::sleep_for(2 * kPatience);
        is_prepared = true;
      },
      [&](int64_t) { ++(is_prepared ? begun : begun_too_early); });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.message, "");
  EXPECT_EQ(begun, 3);
  EXPECT_EQ(begun_too_early, 0);
}

TEST(BeginTogether, OneThatCannotPrepareEndsAllWithItsReason) {
  for (const int64_t refused : {0, 2}) {
    const uint16_t port = free_port();
    const auto outcomes = begin_all(
        {alone_on_host(0, 3, port), alone_on_host(1, 3, port),
         alone_on_host(2, 3, port)},
        [&](int64_t rank) {
          TS_CHECK_CONFIG(rank != refused, "no text here.");
        },
        [](int64_t) { ADD_FAILURE() << "a rank began"; });
    for (int64_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(outcomes[rank].code, ExitCode::kConfig);
      EXPECT_THAT(outcomes[rank].message, HasSubstr("no text here."));
      if (rank == refused) continue;
      EXPECT_THAT(outcomes[rank].message,
                  HasSubstr(c10::str("rank ", refused, " (")));
      EXPECT_THAT(outcomes[rank].message, HasSubstr(") could not begin: "));
    }
  }
}

TEST(BeginTogether, SoDoesOneThatEndsBeforeItJoins) {
  for (const int64_t refused : {0, 1}) {
    const uint16_t port = free_port();
    const Error why(ExitCode::kInputOutput, "run.json cannot be read.");
    Outcome other;
    std::thread waits([&] {
      other = try_to_begin(alone_on_host(1 - refused, 2, port), nothing,
                           [](int64_t) { ADD_FAILURE() << "a rank began"; });
    });
    refuse(alone_on_host(refused, 2, port), why);
    waits.join();
    EXPECT_EQ(other.code, ExitCode::kInputOutput);
    EXPECT_THAT(other.message, HasSubstr("run.json cannot be read."));
  }
}

TEST(BeginTogether, WhatALibraryThrowsHasTheCodeThatTheRankEndsWith) {
  const uint16_t port = free_port();
  const std::filesystem::filesystem_error why(
      "cannot copy", std::make_error_code(std::errc::no_space_on_device));
  Outcome other;
  std::thread waits([&] {
    other = try_to_begin(alone_on_host(0, 2, port), nothing,
                         [](int64_t) { ADD_FAILURE() << "a rank began"; });
  });
  refuse(alone_on_host(1, 2, port), why);
  waits.join();
  EXPECT_EQ(other.code, ExitCode::kInputOutput);
  EXPECT_THAT(other.message, HasSubstr("cannot copy"));
}

// Rank 0 serves, and is gone when the other one has prepared.
TEST(BeginTogether, WhoPreparesHearsOfARefusalMeanwhile) {
  const uint16_t port = free_port();
  const pid_t refused = fork();
  if (refused == 0) {
    try_to_begin(
        alone_on_host(0, 2, port),
        [](int64_t) { TS_CHECK_CONFIG(false, "no text here."); }, nothing);
    _exit(0);
  }
  const Outcome outcome = try_to_begin(
      alone_on_host(1, 2, port), [&](int64_t) { waitpid(refused, nullptr, 0); },
      nothing);
  EXPECT_EQ(outcome.code, ExitCode::kConfig);
  EXPECT_THAT(outcome.message, HasSubstr("no text here."));
}

TEST(BeginTogether, OneThatStandsStillIsNamed) {
  const uint16_t port = free_port();
  const pid_t stopped = fork();
  if (stopped == 0) {
    try_to_begin(
        alone_on_host(1, 2, port), [](int64_t) { raise(SIGSTOP); }, nothing);
    _exit(0);
  }
  const Outcome outcome =
      try_to_begin(alone_on_host(0, 2, port), nothing, nothing);
  EXPECT_EQ(outcome.code, ExitCode::kUnreachable);
  EXPECT_THAT(outcome.message, HasSubstr("rank 1 ("));
  EXPECT_THAT(outcome.message, HasSubstr("was not heard of for 1 s"));
  kill(stopped, SIGKILL);
  waitpid(stopped, nullptr, 0);
}

}  // namespace
}  // namespace tessera::launch
