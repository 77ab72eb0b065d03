// Bytes of model states on a device beside the figures that papers and guides
// give, on as many devices as they have: by the plan, which starts no rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tessera/engine/memory_plan.h"
#include "tessera/models/model.h"

namespace tessera::engine {
namespace {

// Of 10.07 B parameters: 50 layers of 4096.
RunConfig ten_billion() {
  RunConfig config;
  config.data.train = {"any text"};
  config.model.family = "gpt2";
  config.model.layers = 50;
  config.model.hidden = 4096;
  config.model.heads = 32;
  config.model.vocab = 512;
  config.model.max_seq = config.data.seq_len = 512;
  config.precision = {.compute = "bf16", .reduce = "bf16"};
  config.batch.micro = 1;
  return config;
}

// GB of the fullest device, for a model of `as_many` parameters.
double gigabytes(RunConfig config, int64_t ranks, double as_many) {
  const auto count = static_cast<double>(models::num_parameters(config.model));
  config.batch.global = ranks;
  complete(config, ranks);
  int64_t most = 0;
  for (const auto& plan : memory_plans(config)) {
    most = std::max(most, plan.states);
  }
  return static_cast<double>(most) / count * as_many / 1e9;
}

double with_stage(int64_t stage, int64_t ranks, double as_many,
                  const char* compute = "bf16") {
  RunConfig config = ten_billion();
  config.precision = {.compute = compute, .reduce = compute};
  config.mesh.dp = ranks;
  config.zero.stage = stage;
  return gigabytes(config, ranks, as_many);
}

// Worked example 11: 2 + 2 + 12 bytes a parameter, or 4 + 4 + 8.
TEST(MemoryFigures, TenBillionParametersOnFourDevices) {
  const std::vector<double> mixed = {160, 70, 55, 40};
  const std::vector<double> single = {160, 100, 70, 40};
  for (const int64_t stage : {0, 1, 2, 3}) {
    EXPECT_NEAR(with_stage(stage, 4, 10e9), mixed[stage], 1e-3 * mixed[stage]);
    EXPECT_NEAR(with_stage(stage, 4, 10e9, "fp32"), single[stage],
                1e-3 * single[stage]);
  }
  EXPECT_NEAR(with_stage(0, 1, 1e9, "fp32"), 16, 1e-3);
  EXPECT_NEAR(with_stage(0, 1, 1e9), 16, 1e-3);
}

struct Saved {
  int64_t ranks;
  double mixed[3], single[2];  // by stages 1, 2, 3; by 1, 2
};

TEST(MemoryFigures, FactorsSaved) {
  for (const Saved& row : {Saved{2, {1.60, 1.78, 2}, {1.33, 1.60}},
                           Saved{4, {2.29, 2.91, 4}, {1.60, 2.29}},
                           Saved{8, {2.91, 4.27, 8}, {1.78, 2.91}},
                           Saved{16, {3.37, 5.57, 16}, {1.88, 3.37}},
                           Saved{64, {3.82, 7.21, 64}, {1.97, 3.82}}}) {
    const auto factor = [&](int64_t stage, const char* compute) {
      return 16 / with_stage(stage, row.ranks, 1e9, compute);
    };
    for (const int64_t stage : {1, 2, 3}) {
      EXPECT_NEAR(factor(stage, "bf16"), row.mixed[stage - 1],
                  5e-3 + 1e-3 * row.mixed[stage - 1])
          << row.ranks << " ranks, stage " << stage;
      if (stage == 3) continue;
      EXPECT_NEAR(factor(stage, "fp32"), row.single[stage - 1], 6e-3)
          << row.ranks << " ranks, stage " << stage;
    }
  }
}

// ../shared/tables/zero_table1_memory_gb.csv: Rajbhandari et al. 2020, "ZeRO",
// table 1, of which every model is a multiple of the bytes a parameter.
struct Published {
  int64_t ranks;
  double of_7_5b[3], of_128b[3], of_1t[3];  // GB by stages 1, 2, 3
};

TEST(MemoryFigures, TableOfZero) {
  for (const Published& row :
       {Published{1, {120, 120, 120}, {2048, 2048, 2048}, {16e3, 16e3, 16e3}},
        Published{4, {52.5, 41.25, 30}, {896, 704, 512}, {7000, 5500, 4000}},
        Published{
            16, {35.625, 21.5625, 7.5}, {608, 368, 128}, {4750, 2875, 1000}},
        Published{64,
                  {31.4062, 16.6406, 1.875},
                  {536, 284, 32},
                  {4187.5, 2218.75, 250}},
        Published{256,
                  {30.3516, 15.4102, 0.4688},
                  {518, 263, 8},
                  {4046.875, 2054.6875, 62.5}},
        Published{1024,
                  {30.0879, 15.1025, 0.1172},
                  {513.5, 257.75, 2},
                  {4011.7188, 2013.6719, 15.625}}}) {
    for (const int64_t stage : {1, 2, 3}) {
      const double of_1b = with_stage(stage, row.ranks, 1e9);
      const auto expect = [&](double billions, const double (&gb)[3]) {
        // Parameters that no number of ranks divides are filled up.
        EXPECT_NEAR(billions * of_1b, gb[stage - 1], 2e-3 * gb[stage - 1])
            << billions << " billion on " << row.ranks << ", stage " << stage;
      };
      expect(7.5, row.of_7_5b);
      expect(128, row.of_128b);
      expect(1000, row.of_1t);
    }
  }
}

// Worked example 6: 1e12 parameters on tp 8 x pp 8 x data 64.
TEST(MemoryFigures, ATrillionParametersOnFourThousandDevices) {
  RunConfig config = ten_billion();
  config.model.layers = 128;
  config.model.hidden = 25600;
  config.model.heads = 64;
  config.mesh.tp = config.mesh.pp = 8;
  config.mesh.dp = 64;
  EXPECT_NEAR(gigabytes(config, 4096, 1e12), 250.0, 0.5);
  config.zero.stage = 1;
  EXPECT_NEAR(gigabytes(config, 4096, 1e12), 65.4, 0.2);
}

}  // namespace
}  // namespace tessera::engine
