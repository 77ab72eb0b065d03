#include "tessera/verify/random_batch.h"

#include <ATen/ATen.h>

#include <string>

#include "tessera/core/random.h"

namespace tessera::verify {

data::Batch random_batch(const engine::RunConfig& config, int64_t step,
                         int64_t first, int64_t count) {
  const random::Stream stream(static_cast<uint64_t>(config.run.seed),
                              "verify/" + std::to_string(step));
  const int64_t length = config.data.seq_len + 1;
  const at::Tensor ids = at::empty({count, length}, at::kLong);
  auto* id = ids.mutable_data_ptr<int64_t>();
  const auto begin = static_cast<uint64_t>(first * length);
  for (int64_t i = 0; i < ids.numel(); ++i) {
    id[i] = static_cast<int64_t>(
        stream.below(begin + static_cast<uint64_t>(i),
                     static_cast<uint64_t>(config.model.vocab)));
  }
  return {ids.narrow(1, 0, length - 1), ids.narrow(1, 1, length - 1)};
}

}  // namespace tessera::verify
