// From the documents of many files to the ids in a cache.
#pragma once

#include "tessera/data/detail/token_cache.h"
#include "tessera/data/documents.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data::detail {

struct Tokenization {
  std::vector<std::string> paths;
  DocumentForm form;
  const Tokenizer& tokenizer;
  int64_t threads = 0;  // 0: all cores
};

// Says every few seconds how far it is and how long it will take, and at the
// end what there was.
void tokenize_documents(const Tokenization& work, CacheWriter& cache);

}  // namespace tessera::data::detail
