// A stream of tokens in windows, one behind the other, for an evaluation.
//
// Every token but the first is a target once, in its order, and none sees
// beyond its window: `seq_len` tokens predict as many. The last window has what
// is left, alone in its batch.
#pragma once

#include <cstdint>

#include "tessera/data/dataset.h"
#include "tessera/data/token_stream.h"

namespace tessera::data {

class Windows {
 public:
  // `batch`: windows at a time. `padded`: the last one is as long as the
  // others, where ranks cut it; Batch::unpadded says how long it was.
  // REQUIRES: two tokens; `tokens` lives as long.
  Windows(const TokenStream& tokens, int64_t seq_len, int64_t batch,
          bool padded);

  int64_t count() const;  // batches
  Batch read(int64_t index) const;

 private:
  int64_t targets() const { return tokens_.size() - 1; }
  int64_t full() const { return targets() / seq_len_; }  // windows
  int64_t rest() const { return targets() % seq_len_; }
  // `count` windows of `length` targets each, from this one on.
  Batch read(int64_t first, int64_t count, int64_t length) const;

  const TokenStream& tokens_;
  const int64_t seq_len_, batch_;
  const bool padded_;
};

}  // namespace tessera::data
