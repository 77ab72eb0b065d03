// Learns a byte-level BPE vocabulary from text.
//
// Deterministic, and the same vocabulary and merges as Hugging Face's
// BpeTrainer gives the same texts (one sequence a text): special tokens first,
// then the 256 bytes, then the merges; of pairs that are equally frequent the
// one with the smaller ids comes first.
// Errors: TS_CHECK_CONFIG where vocab_size does not hold the bytes and special
//         tokens; TS_CHECK_IO on text that is not UTF-8; as documents.h.
// Source: Sennrich et al., arXiv 1508.07909.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/documents.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {

struct TokenizerTraining {
  int64_t vocab_size = 8192;  // with bytes and special tokens
  std::vector<std::string> special_tokens = {"<|endoftext|>"};
  SplitPattern pattern = SplitPattern::kGpt2;
  int64_t threads = 0;  // 0: all cores
};

// The vocabulary is smaller than asked for where the text has no more pairs.
Tokenizer train_tokenizer(const std::vector<std::string_view>& texts,
                          const TokenizerTraining& training);

// On the documents of the files.
Tokenizer train_tokenizer_on_files(const std::vector<std::string>& paths,
                                   const TokenizerTraining& training,
                                   const DocumentForm& form = {});

}  // namespace tessera::data
