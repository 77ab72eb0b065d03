#include "tessera/comm/base/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tessera/core/host.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using State = FlightRecorder::State;

FlightRecorder::Record call(uint64_t sequence, const std::string& what,
                            State state = State::kDone) {
  return {.sequence = sequence,
          .what = what,
          .signature = what.substr(0, what.find(' ')),
          .state = state,
          .seconds = 0.5,
          .seconds_ago = 3.5,
          .step = 12,
          .doing = "Forward stage 0 micro-batch 3"};
}

GroupReport world(std::vector<FlightRecorder::Record> records) {
  return {.name = "world", .ranks = {0, 1, 2}, .records = std::move(records)};
}

RankReport report(int64_t rank, std::vector<FlightRecorder::Record> records) {
  return {.rank = rank, .groups = {world(std::move(records))}};
}

Question collective(uint64_t sequence, bool ranks_differ = false) {
  return {.group = world({}),
          .failed = {.verb = Verb::kAllReduce, .sequence = sequence},
          .why = "it failed",
          .ranks_differ = ranks_differ};
}

Question message() {
  return {.group = world({}),
          .failed = {.verb = Verb::kRecv, .peer = 1},
          .why = "it failed"};
}

TEST(RankReport, SurvivesItsText) {
  const RankReport written =
      report(2, {call(1, "barrier #1"),
                 call(2, "all_reduce(sum) #2 float32[4]", State::kPending)});
  const auto read = report_of_json(to_json(written));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->rank, 2);
  ASSERT_EQ(read->groups.size(), 1U);
  EXPECT_EQ(read->groups[0].ranks, written.groups[0].ranks);
  EXPECT_EQ(read->groups[0].records[1].what, "all_reduce(sum) #2 float32[4]");
  EXPECT_EQ(read->groups[0].records[1].signature, "all_reduce(sum)");
  EXPECT_EQ(read->groups[0].records[1].state, State::kPending);
  EXPECT_EQ(read->groups[0].records[1].step, 12);
  EXPECT_FALSE(report_of_json("{"));
  EXPECT_FALSE(report_of_json("{}"));
}

TEST(Verdict, NamesWhoHasNotComeAndWhatItDidLast) {
  const std::string said =
      verdict_on(collective(2),
                 {{0, report(0, {call(2, "all_reduce #2", State::kPending)})},
                  {1, report(1, {call(1, "barrier #1")})},
                  {2, report(2, {call(2, "all_reduce #2", State::kPending)})}},
                 {});
  EXPECT_EQ(said,
            "rank 1 has not come to it: it last did barrier #1 in Forward "
            "stage 0 micro-batch 3 of step 12, 3 s ago");
}

TEST(Verdict, SaysWhatARankStandsInThatWaitsForNobody) {
  RankReport busy = report(1, {call(1, "barrier #1")});
  busy.stack = {"read",     "std::invoke", "lib.so+0x12", "a::Reader::next",
                "a::train", "a::train",    "main"};
  const RankReport waiting =
      report(2, {call(1, "all_reduce #1", State::kPending)});
  std::map<int64_t, RankReport> reports = {
      {0, report(0, {call(2, "all_reduce #2", State::kPending)})},
      {1, *report_of_json(to_json(busy))},
      {2, waiting}};
  reports[2].stack = busy.stack;
  const std::string said = verdict_on(collective(2), reports, {});
  EXPECT_THAT(said, HasSubstr("3 s ago; it stands in read, called by "
                              "a::Reader::next, called by a::train, called by "
                              "main; rank 2"));
  EXPECT_THAT(said, ::testing::EndsWith("for 0.5 s"));
}

TEST(Verdict, NamesWhoCallsSomethingElse) {
  const std::string said =
      verdict_on(collective(2),
                 {{0, report(0, {call(2, "all_reduce #2", State::kPending)})},
                  {1, report(1, {call(2, "barrier #2", State::kPending)})},
                  {2, report(2, {call(2, "all_reduce #2", State::kPending)})}},
                 {});
  EXPECT_EQ(said,
            "the ranks differ: ranks 0, 2 call all_reduce #2; rank 1 calls "
            "barrier #2");
}

TEST(Verdict, OfOtherShapesAloneIsNoDifference) {
  const auto all = [](int64_t rank) {
    return report(rank, {call(1, c10::str("all_to_all #1 float32[", rank, ']'),
                              State::kPending)});
  };
  EXPECT_EQ(
      verdict_on(collective(1), {{0, all(0)}, {1, all(1)}, {2, all(2)}}, {}),
      "");
}

// Its number is that of the next call.
TEST(Verdict, ARefusedCallIsNotTheOneThatIsMissing) {
  const RankReport refused =
      report(1, {call(1, "barrier #1"),
                 call(2, "all_reduce(sum) #2 int16[4]", State::kRefused)});
  EXPECT_THAT(
      verdict_on(collective(2),
                 {{0, report(0, {call(2, "all_reduce #2", State::kPending)})},
                  {1, *report_of_json(to_json(refused))},
                  {2, report(2, {call(2, "all_reduce #2", State::kPending)})}},
                 {}),
      ::testing::StartsWith("rank 1 has not come to it: it was refused "
                            "all_reduce(sum) #2 int16[4]"));
}

// Rank 1 has swapped two calls; rank 0 keeps less, rank 2 is a call behind.
TEST(Verdict, OfRanksThatDifferedNamesTheFirstCallAtWhichTheyDid) {
  const std::map<int64_t, RankReport> reports = {
      {0, report(0, {call(2, "barrier #2"), call(3, "all_reduce #3"),
                     call(4, "broadcast #4"), call(5, "barrier #5")})},
      {1, report(1, {call(1, "barrier #1"), call(2, "barrier #2"),
                     call(3, "broadcast #3"), call(4, "all_reduce #4"),
                     call(5, "barrier #5")})},
      {2, report(2, {call(1, "all_reduce #1"), call(2, "barrier #2"),
                     call(3, "all_reduce #3"), call(4, "broadcast #4")})}};
  std::map<int64_t, RankReport> last = reports;
  last[2].groups[0].records.erase(last[2].groups[0].records.begin());
  EXPECT_EQ(verdict_on(collective(5, /*ranks_differ=*/true), last, {}),
            "the ranks differ: ranks 0, 2 call all_reduce #3; rank 1 calls "
            "broadcast #3");
  EXPECT_EQ(verdict_on(collective(5, /*ranks_differ=*/true), reports, {}),
            "the ranks differ: rank 1 calls barrier #1; rank 2 calls "
            "all_reduce #1");
  EXPECT_EQ(verdict_on(collective(2, /*ranks_differ=*/true), last, {}), "");
}

TEST(Verdict, SaysWhyARankDoesNotAnswer) {
  const std::map<int64_t, RankReport> reports = {
      {0, report(0, {call(2, "all_reduce #2", State::kPending)})}};
  const std::string said = verdict_on(
      collective(2), reports,
      {{1, {.host = "elsewhere", .pid = 5}},
       {2, {.host = host_name(), .pid = 1 << 30, .space = process_space()}}});
  EXPECT_THAT(said,
              AllOf(HasSubstr("rank 1 does not answer (pid 5 on elsewhere): "
                              "dead, stopped or cut off"),
                    HasSubstr("rank 2 has died"), Not(HasSubstr("rank 0"))));
}

TEST(Verdict, SaysNothingWhereAllCameAndAgree) {
  Question alone = collective(1);
  alone.group = {.name = "dp", .ranks = {0}, .records = {}};
  EXPECT_EQ(verdict_on(alone,
                       {{0,
                         {.rank = 0,
                          .groups = {{.name = "dp",
                                      .ranks = {0},
                                      .records = {call(1, "barrier #1")}}}}}},
                       {}),
            "");
}

// The ranks of a pipeline wait for one another: it is seldom the neighbour.
TEST(Verdict, OfAMessageNamesWhoDoesNotAnswer) {
  EXPECT_EQ(verdict_on(message(), {{0, report(0, {})}, {1, report(1, {})}}, {}),
            "rank 2 does not answer");
}

TEST(Verdict, OfAMessageElseTellsWhatItsPeerDid) {
  const std::map<int64_t, RankReport> all = {
      {0, report(0, {})},
      {1, report(1, {call(7, "send #7", State::kPending)})},
      {2, report(2, {})}};
  EXPECT_THAT(verdict_on(message(), all, {}),
              HasSubstr("rank 1 is in send #7"));
}

// Called out of order: what is not done tells more than what came last.
TEST(Verdict, OfAMessageTellsWhatItsPeerWaitsFor) {
  const std::map<int64_t, RankReport> all = {
      {0, report(0, {})},
      {1, report(1, {call(7, "recv #7", State::kPending), call(8, "send #8")})},
      {2, report(2, {})}};
  EXPECT_THAT(verdict_on(message(), all, {}),
              HasSubstr("rank 1 is in recv #7"));
}

TEST(Verdict, NamesWhoIsSilentBehindTheGroup) {
  const RankReport waits = report(1, {call(1, "barrier #1", State::kPending)});
  EXPECT_EQ(awaited_by(waits), (std::vector<int64_t>{0, 2}));
  EXPECT_TRUE(awaited_by(report(1, {call(1, "barrier #1")})).empty());
  Question of_pair = collective(1);
  of_pair.group = {.name = "tp", .ranks = {0, 1}, .records = {}};
  EXPECT_THAT(
      verdict_on(
          of_pair, {{0, report(0, {})}, {1, waits}},
          {{0, {}},
           {1, {}},
           {2,
            {.host = host_name(), .pid = 1 << 30, .space = process_space()}}}),
      HasSubstr("; behind that, rank 2 has died"));
}

}  // namespace
}  // namespace tessera::comm
