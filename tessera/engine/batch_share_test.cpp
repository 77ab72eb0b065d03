#include "tessera/engine/batch_share.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/comm/communicator.h"
#include "tessera/engine/reader.h"

namespace tessera::engine {
namespace {

// Numbers that tell the batch, the micro-batch and the tensor.
data::Batch batch_of(int64_t key, int64_t microbatch, const BatchExtent& of,
                     bool documents) {
  const auto tensor = [&](int64_t kind) {
    return at::arange(of.samples * of.tokens).view({of.samples, of.tokens}) +
           1000 * (100 * key + 10 * microbatch + kind);
  };
  return {tensor(0), tensor(1), documents ? tensor(2) : at::Tensor()};
}

void expect_equal(const data::Batch& one, const data::Batch& other) {
  EXPECT_TRUE(at::equal(one.inputs, other.inputs));
  EXPECT_TRUE(at::equal(one.targets, other.targets));
  ASSERT_EQ(one.document_starts.defined(), other.document_starts.defined());
  if (!one.document_starts.defined()) return;
  EXPECT_TRUE(at::equal(one.document_starts, other.document_starts));
}

// One is held while the next one travels; the first rank alone reads.
TEST(BatchShare, AllGetWhatTheFirstReads) {
  const BatchExtent extent{.microbatches = 3,
                           .samples = 2,
                           .tokens = 5,
                           .documents = true,
                           .depths = 1};
  comm::run_threads(3, "shm", [&](comm::Communicator& ranks) {
    BatchShare share(ranks.world());
    const auto documents = [](int64_t key) { return key != 2; };
    const auto begin = [&](int64_t key) {
      const auto require_first = [&] { EXPECT_EQ(ranks.rank(), 0); };
      share.begin(key, extent,
                  {.microbatch =
                       [&](int64_t m) {
                         require_first();
                         return batch_of(key, m, extent, documents(key));
                       },
                   .num_targets =
                       [&](int64_t depth) {
                         require_first();
                         return 7 * key + depth;
                       }},
                  comm::Mode::kAsync);
      EXPECT_EQ(share.coming(), key);
    };
    EXPECT_EQ(share.coming(), std::nullopt);
    begin(0);
    for (int64_t key = 0; key < 4; ++key) {
      share.await();
      share.turn();
      EXPECT_EQ(share.coming(), std::nullopt);
      begin(key + 1);
      EXPECT_EQ(share.num_targets(),
                (std::vector<int64_t>{7 * key, 7 * key + 1}));
      for (int64_t m = 0; m < extent.microbatches; ++m) {
        expect_equal(share.microbatch(m),
                     batch_of(key, m, extent, documents(key)));
      }
    }
    share.await();
  });
}

RunConfig run_of(const mesh::MeshConfig& mesh) {
  RunConfig config;
  config.data.train = {"random tokens"};
  config.data.reader = "first";
  config.mesh = mesh;
  config.batch = {.global = 8, .micro = 1};
  complete(config, implied_world_size(config));
  return config;
}

TEST(Reader, IsTheFirstRankWithTheSameSamples) {
  const auto readers = [](const RunConfig& config) {
    std::vector<int64_t> all;
    for (int64_t rank = 0; rank < implied_world_size(config); ++rank) {
      all.push_back(reader_of(config, rank));
    }
    return all;
  };
  using Ranks = std::vector<int64_t>;
  RunConfig config = run_of({.pp = 2, .dp = 2, .tp = 2});
  EXPECT_EQ(readers(config), (Ranks{0, 0, 2, 2, 0, 0, 2, 2}));
  config.data.reader = "every";
  EXPECT_EQ(readers(config), (Ranks{0, 1, 2, 3, 4, 5, 6, 7}));
  config = run_of({.pp = 2,
                   .dp = 2,
                   .order = {"dp_replicate", "dp_shard", "cp", "tp", "pp"}});
  EXPECT_EQ(readers(config), (Ranks{0, 0, 2, 2}));
  config = run_of({.dp = 4});
  EXPECT_FALSE(reads_for_others(config));
  EXPECT_EQ(readers(config), (Ranks{0, 1, 2, 3}));
}

}  // namespace
}  // namespace tessera::engine
