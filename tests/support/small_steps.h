// Steps of a model of a few numbers, on samples that are drawn by their place.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "tessera/core/random.h"
#include "tessera/engine/rank_model.h"
#include "tests/support/small_run.h"

namespace tessera::testing {

// Of no mesh yet, and not completed.
inline engine::RunConfig smallest_run() {
  engine::RunConfig config = small_run(1, 0);
  config.model.hidden = 16;
  config.model.heads = config.model.kv_heads = config.model.head_dim = 4;
  config.model.ffn = 24;
  config.model.vocab = 40;
  config.mesh = {};
  config.data.seq_len = 8;
  config.optimizer.clip_norm = 0.5;
  return config;
}

// REQUIRES: `config` outlives it.
inline engine::StepBatch drawn_batches(const engine::RunConfig& config) {
  return [&config](int64_t step, int64_t first, int64_t count) {
    const random::Stream stream(7, "tokens");
    const int64_t length = config.data.seq_len;
    const at::Tensor ids = at::empty({count, length + 1}, at::kLong);
    auto* const id = ids.mutable_data_ptr<int64_t>();
    const auto start = static_cast<uint64_t>(
        (step * config.batch.global + first) * (length + 1));
    for (int64_t i = 0; i < ids.numel(); ++i) {
      id[i] = static_cast<int64_t>(
          stream.uniform(start + static_cast<uint64_t>(i)) *
          static_cast<double>(config.model.vocab));
    }
    return data::Batch{ids.narrow(1, 0, length), ids.narrow(1, 1, length)};
  };
}

}  // namespace tessera::testing
