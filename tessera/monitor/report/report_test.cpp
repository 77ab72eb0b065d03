#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/monitor/report/page.h"

namespace tessera::monitor::report {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

void write(const std::string& path, const std::string& text) {
  write_file_atomic(path, text);
}

std::string a_run(const TemporaryFolder& folder, const std::string& name) {
  const std::string run = folder.file(name);
  write(run + "/config.json",
        R"({"run": {"name": ")" + name + R"("}, "model": {"layers": 2}})");
  write(run + "/metrics.jsonl",
        R"({"step":1,"loss":7.5,"bubble":0.25,"expert_load":[0.5,0.5]})"
        "\n"
        R"({"step":2,"loss":null,"valid_loss":6.5})"
        "\n"
        R"({"step":3,"lo)");
  write(run + "/summary.json",
        R"({"reason": "done", "steps": 2, "total_steps": 2, "communication":)"
        R"([{"group": "dp", "verb": "all_reduce", "calls": 3, "bytes": 4096,)"
        R"("seconds": 0.5}], "links": []})");
  write(run + "/samples.jsonl",
        R"({"step":2,"prompt":"in <the","text":" beginning","tokens":2})"
        "\n");
  write(run + "/logs/rank-0.log",
        "12:30:01 [rank 0/2 dp=0] resumed after step 1\n"
        "12:30:02 warning: <b>\n");
  return run;
}

TEST(Report, ReadsWhatARunFolderTells) {
  const TemporaryFolder folder;
  const RunHistory run = read_history(a_run(folder, "one"));
  EXPECT_EQ(run.name, "one");
  ASSERT_EQ(run.figures.at("loss").size(), 2);  // the torn line is left out
  EXPECT_TRUE(std::isnan(run.figures.at("loss")[1].second));
  EXPECT_THAT(run.figures.at("expert_load.1"), ElementsAre(Pair(1, 0.5)));
  EXPECT_THAT(run.resumed_after, ElementsAre(1));
  ASSERT_EQ(run.traffic.size(), 1);
  EXPECT_EQ(run.traffic[0].bytes, 4096);
  EXPECT_EQ(run.settings.at("model.layers"), "2");
}

TEST(Report, RefusesAFolderOfNoRun) {
  const TemporaryFolder folder;
  EXPECT_THROW(read_history(folder.path()), Error);
  write(folder.file("metrics.jsonl"), "{\"step\":1}\nnonsense\n");
  try {
    read_history(folder.path());
    ADD_FAILURE() << "taken";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("metrics.jsonl: line 2"));
  }
}

TEST(Report, ThePageNeedsNothingElse) {
  const TemporaryFolder folder;
  const std::string page = page_of({read_history(a_run(folder, "one"))});
  EXPECT_THAT(
      page,
      AllOf(HasSubstr("<svg"), HasSubstr("all_reduce"),
            HasSubstr("resumed after step 1"), HasSubstr("warning: &lt;b&gt;"),
            HasSubstr("step 2</td><td><i>in &lt;the</i> beginning"),
            Not(HasSubstr("<script")), Not(HasSubstr("http")),
            Not(HasSubstr("nan"))));
}

TEST(Report, OfManySamplesTheFirstAndTheLastAreShown) {
  RunHistory run{.name = "long"};
  for (int64_t step = 1; step <= 1000; ++step) {
    run.samples.push_back({.step = step, .prompt = "", .text = "words"});
  }
  const std::string page = page_of({run});
  EXPECT_THAT(page, AllOf(HasSubstr("step 1<"), HasSubstr("step 1000<"),
                          Not(HasSubstr("step 2<")), HasSubstr("40 of 1000")));
}

TEST(Report, SeveralRunsSayWhatIsConfiguredOtherwise) {
  const TemporaryFolder folder;
  const std::string page = page_of(
      {read_history(a_run(folder, "one")), read_history(a_run(folder, "two"))});
  EXPECT_THAT(page, HasSubstr("Configured otherwise"));
  EXPECT_THAT(page, HasSubstr("loss, training"));
}

// However long a run is, a spike of one step is seen.
TEST(Chart, KeepsTheSpikesOfLongSeries) {
  Series series{.name = "loss", .points = {}};
  for (int i = 0; i < 100000; ++i) series.points.emplace_back(i, 1.0);
  series.points[54321].second = 9.0;
  const std::string spiked = svg({.title = "t", .series = {series}});
  EXPECT_LT(spiked.size(), 40000);
  // The top of the drawing, where the highest value is.
  EXPECT_THAT(spiked, HasSubstr(" 10.0L"));
}

TEST(Chart, IsNothingWithoutAValue) {
  EXPECT_EQ(svg({.title = "t", .series = {}}), "");
  EXPECT_EQ(svg({.title = "t", .series = {{"a", {{1, std::nan("")}}}}}), "");
}

}  // namespace
}  // namespace tessera::monitor::report
