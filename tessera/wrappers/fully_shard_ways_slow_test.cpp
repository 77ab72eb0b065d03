// fully_shard in every stage and mesh against one rank, in double, for modules
// of several kinds.
#include <gtest/gtest.h>

#include "tests/support/own_modules.h"

namespace tessera {
namespace {

using namespace tests;

TEST(FullyShardWays, EqualsOneRank) {
  for (const Kind& kind : kinds()) {
    const Values wanted = one_rank(kind);
    for (int64_t stage : {0, 1, 2, 3}) {
      for (const Ways& c :
           {Ways{.shard = 2}, Ways{.shard = 3}, Ways{.shard = 4},
            Ways{.replicate = 2, .shard = 2}}) {
        for (const bool keeps : {true, false}) {
          // Of stage 0 there is nothing to gather.
          if (stage == 0 && (keeps || c.shard > 2)) continue;
          Ways with = c;
          with.options.zero_stage = stage;
          with.options.reshard_after_forward = !keeps;
          with.options.prefetch = keeps ? 0 : 1;
          SCOPED_TRACE(c10::str(kind.name, " stage ", stage, " ", c.replicate,
                                "x", c.shard, " keeps ", keeps));
          expect_equal(many_ranks(kind, with), wanted, 1e-10);
        }
      }
    }
  }
}

TEST(FullyShardWays, MicroBatchesAddUp) {
  for (const Kind& kind : kinds()) {
    const Values wanted = one_rank(kind);
    for (int64_t stage : {0, 1, 2, 3}) {
      for (int64_t replicate : {1, 2}) {
        for (const bool own : {true, false}) {
          SCOPED_TRACE(c10::str(kind.name, " stage ", stage, " replicate ",
                                replicate, " own ", own));
          const Ways c{.replicate = replicate,
                       .shard = 2,
                       .options = {.zero_stage = stage},
                       .microbatches = 3,
                       .own_backward = own};
          expect_equal(many_ranks(kind, c), wanted, 1e-10);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
