#include "tessera/benchmark/kernels/report.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <iterator>
#include <limits>
#include <sstream>
#include <thread>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"

namespace tessera::benchmark::kernels {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

std::vector<Row> rows() {
  return {{.kernel = "swiglu",
           .dtype = "bf16",
           .shape = "2048x1408",
           .ulps = 0.503,
           .seconds = 1e-3,
           .libtorch_seconds = 2.5e-3,
           .bytes = 17e6},
          {.kernel = "product_dx",
           .dtype = "fp32",
           .shape = "2x3x4",
           .ulps = 1.26,
           .seconds = 4e-6,
           .libtorch_seconds = 2e-6,
           .flops = 48e3}};
}

TEST(KernelsReport, LinesStandBelowTheirColumns) {
  const std::string names = column_names();
  EXPECT_THAT(names, StartsWith("#  "));
  for (const Row& row : rows()) {
    EXPECT_EQ(line(row).size(), names.size()) << line(row);
  }
  const auto words = [](const std::string& text) {
    std::istringstream in(text);
    return std::vector<std::string>(std::istream_iterator<std::string>(in), {});
  };
  EXPECT_THAT(words(line(rows()[0])),
              ElementsAre("swiglu", "bf16", "2048x1408", "0.50", "1000.0",
                          "2500.0", "17.00", "-", "2.50"));
  EXPECT_THAT(words(line(rows()[1])),
              ElementsAre("product_dx", "fp32", "2x3x4", "1.26", "4.0", "2.0",
                          "-", "12.00", "0.50"));
}

TEST(KernelsReport, JsonHasEveryFigure) {
  const Circumstances around{.command = "tessera bench kernels",
                             .host = "h",
                             .processor = "p",
                             .vectors = "avx2",
                             .cores = 4,
                             .threads = 2,
                             .build = "b"};
  const auto read = tessera::detail::parse_json(json(around, rows()), "json");
  EXPECT_EQ(read["processor"], "p");
  EXPECT_EQ(read["vectors"], "avx2");
  EXPECT_EQ(read["threads"], 2);
  ASSERT_EQ(read["rows"].size(), 2);
  const auto& row = read["rows"][0];
  EXPECT_EQ(row["kernel"], "swiglu");
  EXPECT_EQ(row["dtype"], "bf16");
  EXPECT_EQ(row["shape"], "2048x1408");
  EXPECT_DOUBLE_EQ(row["ulps"].get<double>(), 0.503);
  EXPECT_DOUBLE_EQ(row["seconds"].get<double>(), 1e-3);
  EXPECT_DOUBLE_EQ(row["libtorch_seconds"].get<double>(), 2.5e-3);
  EXPECT_DOUBLE_EQ(row["ratio"].get<double>(), 2.5);
  EXPECT_DOUBLE_EQ(row["gbps"].get<double>(), 17);
  EXPECT_TRUE(row["gflops"].is_null());
  EXPECT_THAT(heading(around),
              HasSubstr("2 threads on 4 cores of h, p, avx2\n# b\n"));
}

TEST(KernelsUlps, AreJudgedByWhatAnElementIsASumOf) {
  const at::Tensor exact = at::tensor({1.0, -4.0, 0.0}, at::kDouble);
  const at::Tensor magnitude = at::tensor({1.0, 8.0, 0.0}, at::kDouble);
  const auto ulps = [&](const std::vector<double>& found, at::ScalarType type) {
    return ulps_between({at::tensor(found, at::kDouble).to(type)},
                        {{exact, magnitude}});
  };
  EXPECT_EQ(ulps({1, -4, 0}, at::kFloat), 0);
  EXPECT_NEAR(ulps({1 + 0x1p-22, -4, 0}, at::kFloat), 2, 1e-9);
  EXPECT_NEAR(ulps({1, -4 - 0x1p-20, 0}, at::kFloat), 1, 1e-9);
  EXPECT_NEAR(ulps({1 + 0x1p-7, -4, 0}, at::kBFloat16), 1, 1e-9);
  EXPECT_GT(ulps({1, -4, 1e-30}, at::kFloat), 1e7);
  EXPECT_EQ(ulps({1, std::nan(""), 0}, at::kFloat),
            std::numeric_limits<double>::infinity());
}

TEST(KernelsMeasure, AKernelThatIsOffIsRefusedByName) {
  int ours = 0, libtorch = 0;
  Contest contest{
      .kernel = "halved",
      .shape = "1",
      .bytes = 4,
      .found = [] { return std::vector<at::Tensor>{at::full({1}, 0.5)}; },
      .wanted =
          [] {
            const at::Tensor one = at::ones({1}, at::kDouble);
            return std::vector<Reference>{{one, one}};
          },
      .most_ulps = 4,
      .ours = [&] { ++ours; },
      .libtorch = [&] { ++libtorch; }};
  EXPECT_THAT([&] { measure(contest, 0); },
              ThrowsMessage<Error>(HasSubstr("kernel halved of fp32, 1, is off "
                                             "by 4.1943e+06")));
  EXPECT_EQ(ours + libtorch, 0);
  contest.found = [] { return std::vector<at::Tensor>{at::ones({1})}; };
  const Row row = measure(contest, 0);
  EXPECT_EQ(row.ulps, 0);
  EXPECT_EQ(row.timings, 3);
  EXPECT_GE(ours, 5);
  EXPECT_GE(libtorch, 5);
  ours = libtorch = 0;
  contest.libtorch = [&] {
    ++libtorch;
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
  };
  EXPECT_GE(measure(contest, 0).libtorch_seconds, 0.6);
  EXPECT_EQ(libtorch, 1);
  EXPECT_GE(ours, 5);
}

}  // namespace
}  // namespace tessera::benchmark::kernels
