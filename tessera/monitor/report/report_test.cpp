#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
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
  write(
      run + "/summary.json",
      R"({"reason": "done", "steps": 2, "total_steps": 2, "communication":)"
      R"([{"group": "dp", "verb": "all_reduce", "calls": 3, "bytes": 4096,)"
      R"("seconds": 0.5}], "links": [], "ranks": [{"rank": 0, "work_s": 1.25,)"
      R"("wait_s": 0.5, "slowest_in": 17, "mem_peak_mib": 3}]})");
  write(run + "/samples.jsonl",
        R"({"step":2,"prompt":"in <the","text":" beginning","tokens":2})"
        "\n");
  write(run + "/logs/rank-0.log",
        "12:30:01 [rank 0/2 dp=0] resumed after step 1\n"
        "12:30:02 warning: <b>\n");
  return run;
}

TEST(Report, ReadsLogsWithAndWithoutADate) {
  const TemporaryFolder folder;
  const std::string run = a_run(folder, "one");
  write(run + "/logs/rank-0.log",
        "12:30:01 [rank 0/2 dp=0] resumed after step 1\n"
        "of more than a line\n"
        "2026-01-31 12:30:01-0330 [rank 0/2] resumed after step 20\n"
        "2026-01-31 12:30 is no time\n");
  const RunHistory history = read_history(run);
  EXPECT_THAT(history.resumed_after, ElementsAre(1, 20));
  ASSERT_EQ(history.events.size(), 2);
  EXPECT_EQ(history.events[0].time, "12:30:01");
  EXPECT_EQ(history.events[1].time, "2026-01-31 12:30:01-0330");
  EXPECT_EQ(history.events[1].text, "resumed after step 20");
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
  ASSERT_EQ(run.ranks.size(), 1);
  EXPECT_EQ(run.ranks[0].slowest_in, 17);
  EXPECT_EQ(run.settings.at("model.layers"), "2");
}

// A start that goes on, or was killed, has written since.
TEST(Report, TheEndOfAnEarlierStartIsNotThatOfThisOne) {
  const TemporaryFolder folder;
  const std::string run = a_run(folder, "one");
  EXPECT_EQ(read_history(run).summary.at("reason"), "done");
  std::filesystem::last_write_time(
      run + "/summary.json",
      std::filesystem::last_write_time(run + "/metrics.jsonl") -
          std::chrono::seconds(1));
  EXPECT_FALSE(has_ended(run));
  EXPECT_TRUE(read_history(run).summary.empty());
  EXPECT_TRUE(read_history(run).traffic.empty());
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
            HasSubstr("slowest in steps"), HasSubstr(">17<"),
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

// As a summary of long ago may have.
TEST(Report, OfManyLinksTheSlowestAreShown) {
  RunHistory run{.name = "wide"};
  for (int64_t i = 1; i <= 1000; ++i) {
    run.links.push_back(
        {.from = 0, .to = i, .gbps = static_cast<double>(1001 - i)});
  }
  const std::string page = page_of({run});
  EXPECT_THAT(page, AllOf(HasSubstr(">0 - 1000<"), HasSubstr(">0 - 937<"),
                          HasSubstr(">0 - 500<"), Not(HasSubstr(">0 - 936<")),
                          Not(HasSubstr(">0 - 1<"))));
}

TEST(Report, ALongSampleIsCut) {
  const TemporaryFolder folder;
  RunHistory run = read_history(a_run(folder, "one"));
  run.samples[0].text.clear();
  for (int i = 0; i < 5000; ++i) run.samples[0].text += "\u00e9";
  const std::string text = page_of({run});
  EXPECT_THAT(text, HasSubstr("\u00e9<span class=\"soft\"> ... 1000 characters "
                              "are left out: all are in samples.jsonl."));
  EXPECT_EQ(std::ranges::count(text, '\xa9'), 4000);
}

TEST(Report, SeveralRunsSayWhatIsConfiguredOtherwise) {
  const TemporaryFolder folder;
  const std::string page = page_of(
      {read_history(a_run(folder, "one")), read_history(a_run(folder, "two"))});
  EXPECT_THAT(page, HasSubstr("Configured otherwise"));
  EXPECT_THAT(page, HasSubstr("loss, training"));
}

TEST(Report, ARunHasTheSameColourOnEveryChart) {
  const RunHistory one{.name = "one", .figures = {{"loss", {{1, 3}, {2, 2}}}}};
  const RunHistory two{
      .name = "two",
      .figures = {{"loss", {{1, 3}, {2, 2}}}, {"mfu", {{1, 0.5}, {2, 0.4}}}}};
  const std::string page = page_of({one, two});
  const std::string of_mfu = page.substr(page.find("model FLOPs"));
  EXPECT_THAT(of_mfu, AllOf(HasSubstr("stroke=\"" + colour_of(1)),
                            Not(HasSubstr("stroke=\"" + colour_of(0)))));
}

TEST(Report, ManyCheckpointsAreOneLine) {
  RunHistory run{.name = "long"};
  const auto happens = [&](const std::string& time, const std::string& what) {
    run.events.push_back({time, what});
  };
  for (int step = 10; step <= 1000; step += 10) {
    happens(c10::str("12:", step == 1000 ? 59 : 30, ":00"),
            c10::str("checkpoint of step ", step, " is in a folder"));
  }
  happens("13:00:00", "resumed after step 1000");
  happens("13:01:00", "checkpoint of step 1010 is in a folder");
  EXPECT_THAT(page_of({run}),
              AllOf(HasSubstr("12:30:00</td><td class=\"\">100 checkpoints, of "
                              "step 10 to step 1000, the last at 12:59:00<"),
                    Not(HasSubstr("checkpoint of step 20 ")),
                    HasSubstr("resumed after step 1000"),
                    HasSubstr("checkpoint of step 1010 is in a folder")));
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

int64_t count_of(const std::string& part, const std::string& text) {
  int64_t count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != text.npos; ++at) ++count;
  return count;
}

std::string of_points(const Points& points) {
  return svg({.title = "t", .series = {{.name = "a", .points = points}}});
}

TEST(Chart, ShowsAPointAlone) {
  EXPECT_EQ(count_of("<circle", of_points({{5, 1.0}})), 1);
  const double none = std::nan("");
  const std::string between =
      of_points({{1, 1}, {2, none}, {3, 2}, {4, none}, {5, 1}, {6, 2}});
  EXPECT_EQ(count_of("<circle", between), 2);
  EXPECT_EQ(count_of("<path", between), 1);
  EXPECT_EQ(count_of("<circle", of_points({{1, 1}, {2, 2}})), 0);
}

TEST(Chart, KeepsValuesOfLongSeriesThatBeginWithNone) {
  Points points;
  for (int i = 0; i < 10000; ++i) {
    points.emplace_back(i, i % 10 == 0 ? std::nan("") : i);
  }
  const std::string drawn = of_points(points);
  EXPECT_EQ(count_of("<circle", drawn), 0);
  EXPECT_EQ(count_of("M", drawn), 1);  // one line from end to end
}

// What stands between the tags, of labels of this class.
std::vector<std::string> labels(const std::string& svg, const std::string& of) {
  std::vector<std::string> all;
  const std::string tag = "<text class=\"" + of + "\"";
  for (size_t at = 0; (at = svg.find(tag, at)) != svg.npos; ++at) {
    const size_t begin = svg.find('>', at) + 1;
    all.push_back(svg.substr(begin, svg.find('<', begin) - begin));
  }
  return all;
}

TEST(Chart, LabelsDifferFromEachOther) {
  for (const auto& [low, high] : std::vector<std::pair<double, double>>{
           {11.859375, 11.859376}, {0.01, 0.01002}, {1e16, 1.01e16}, {2, 2}}) {
    auto all = labels(of_points({{1, low}, {2, high}}), "y");
    EXPECT_GT(all.size(), 1);
    std::ranges::sort(all);
    EXPECT_EQ(std::ranges::adjacent_find(all), all.end())
        << low << " to " << high << ": " << ::testing::PrintToString(all);
  }
}

// The label of the last step is as wide as it is: it must end in the drawing.
TEST(Chart, TheLastLabelIsWhole) {
  for (const double last : {3000.0, 1e6, 1e9}) {
    const std::string drawn = of_points({{1, 1}, {last, 2}});
    const std::string label = labels(drawn, "x").back();
    const size_t tag = drawn.rfind("<text class=\"x\" x=\"");
    const double at = std::stod(drawn.substr(tag + 19));
    EXPECT_LE(at + 3.0 * static_cast<double>(label.size()), 560) << label;
  }
}

TEST(Chart, ValuesAtTheEndsOfDoubleStayOnIt) {
  const double most = std::numeric_limits<double>::max();
  for (const double low : {-most, -1e308, 1e-308, 0.0}) {
    for (const double high : {most, 1e308}) {
      const std::string drawn =
          svg({.title = "t", .series = {{"s", {{1, low}, {2, high}}}}});
      EXPECT_THAT(drawn, AllOf(Not(HasSubstr("nan")), Not(HasSubstr("inf")),
                               HasSubstr("e+308")));
    }
  }
  const std::string constant =
      svg({.title = "t", .series = {{"s", {{1, most}, {2, most}}}}});
  EXPECT_THAT(constant, AllOf(Not(HasSubstr("nan")), Not(HasSubstr("inf"))));
}

TEST(Chart, IsNothingWithoutAValue) {
  EXPECT_EQ(svg({.title = "t", .series = {}}), "");
  EXPECT_EQ(svg({.title = "t", .series = {{"a", {{1, std::nan("")}}}}}), "");
}

}  // namespace
}  // namespace tessera::monitor::report
