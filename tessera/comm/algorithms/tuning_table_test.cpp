#include "tessera/comm/algorithms/tuning_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::comm::algorithms {
namespace {

using ::testing::HasSubstr;

TuningTable sample() {
  return TuningTable({{.verb = Verb::kAllReduce,
                       .backend = "gloo",
                       .ranks = 4,
                       .min_bytes = 65536,
                       .algorithm = Algorithm::kRing},
                      {.verb = Verb::kAllReduce,
                       .backend = "gloo",
                       .ranks = 4,
                       .min_bytes = 0,
                       .max_bytes = 65536,
                       .algorithm = Algorithm::kRecursiveDoubling},
                      {.verb = Verb::kBroadcast,
                       .backend = "shm",
                       .ranks = 2,
                       .min_bytes = 1024,
                       .max_bytes = 2048,
                       .algorithm = Algorithm::kTree}},
                     "two cores");
}

TEST(TuningTable, GivesTheAlgorithmOfASize) {
  const TuningTable table = sample();
  const auto all_reduce = [&](int64_t ranks, int64_t bytes) {
    return table.algorithm_for(Verb::kAllReduce, "gloo", ranks, bytes);
  };
  EXPECT_EQ(all_reduce(4, 0), Algorithm::kRecursiveDoubling);
  EXPECT_EQ(all_reduce(4, 65535), Algorithm::kRecursiveDoubling);
  EXPECT_EQ(all_reduce(4, 65536), Algorithm::kRing);
  EXPECT_EQ(all_reduce(4, int64_t{1} << 40), Algorithm::kRing);
  EXPECT_EQ(all_reduce(3, 65536), Algorithm::kOwn);
  EXPECT_EQ(table.algorithm_for(Verb::kBroadcast, "shm", 2, 2048),
            Algorithm::kOwn);
  EXPECT_TRUE(table.knows("gloo"));
  EXPECT_FALSE(table.knows("mpi"));
}

TEST(TuningTable, ReadsWhatItWrites) {
  const TemporaryFolder folder;
  const std::string path = folder.file("table.json");
  sample().write(path);
  const TuningTable read = TuningTable::read(path);
  EXPECT_EQ(read.entries(), sample().entries());
  EXPECT_EQ(read.to_json(), sample().to_json());
  EXPECT_EQ(read.fingerprint(), sample().fingerprint());
  EXPECT_NE(read.fingerprint(), TuningTable().fingerprint());
  setenv("TESSERA_COMM_TABLE", path.c_str(), 1);
  EXPECT_EQ(TuningTable::from_environment().entries(), read.entries());
  unsetenv("TESSERA_COMM_TABLE");
  EXPECT_TRUE(TuningTable::from_environment().empty());
}

std::string table_of(const std::string& entry) {
  return "{\"format\": \"tessera-comm-table\", \"version\": 1, \"entries\": "
         "[\n" +
         entry + "]}";
}

TEST(TuningTable, RefusesWhatIsWrongWithItsPlace) {
  const std::string good =
      R"({"verb": "all_reduce", "backend": "gloo", "ranks": 4,)"
      R"( "min_bytes": 0, "algorithm": "ring"})";
  EXPECT_EQ(TuningTable::parse(table_of(good), "t").entries().size(), 1);
  const auto with = [&](const std::string& old,
                        const std::string& replacement) {
    std::string entry = good;
    return table_of(entry.replace(entry.find(old), old.size(), replacement));
  };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[]", "t:1:1: the table must be an object"},
      {R"({"format": "tessera-comm-table"})", "the key 'version' is missing"},
      {R"({"format": "x", "version": 1, "entries": []})", "t:1:12: format is"},
      {R"({"format": "tessera-comm-table", "version": 2, "entries": []})",
       "version is 2; this program reads 1"},
      {with("all_reduce", "barrier"), "t:2:10: verb \"barrier\""},
      {with("all_reduce", "all_to_all"), "there is no all_to_all by ring"},
      {with("ring", "straight"), "there is no all_reduce by straight"},
      {with("ring", "star"), "algorithm \"star\" is not known. Use auto, ring"},
      {with("ring", "hierarchical"), "algorithm \"hierarchical\""},
      {with("all_reduce", "broadcast"), "there is no broadcast by ring"},
      {with("\"ranks\": 4", "\"ranks\": 1"), "ranks is 1"},
      {with("\"ranks\": 4", "\"ranks\": \"4\""), "ranks must be a whole"},
      {with("\"ranks\": 4", "\"rank\": 4"), "unknown key \"rank\""},
      {with("\"min_bytes\": 0", "\"min_bytes\": -1"), "min_bytes is -1"},
      {table_of(good + "," + good), "from 0 and from 0 bytes overlap"},
      {"{", "t:1:2"}};
  for (const auto& [text, said] : cases) {
    try {
      TuningTable::parse(text, "t");
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr(said)) << text;
    }
  }
}

}  // namespace
}  // namespace tessera::comm::algorithms
