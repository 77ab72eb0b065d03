// Where the formats of token files have their ids. Each function refuses a
// header that does not agree with the file's size, naming file and place.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/core/files.h"
#include "tessera/core/hash.h"
#include "tessera/data/token_ids.h"

namespace tessera::data::detail {

struct TokenLayout {
  TokenIds ids;
  int64_t num_documents = 0;  // 0: the format does not tell
};

TokenLayout raw_layout(const MappedFile& file, IdType type);

bool has_llmc_header(const MappedFile& file);
TokenLayout llmc_layout(const MappedFile& file);

bool has_megatron_header(const MappedFile& index);
TokenLayout megatron_layout(const MappedFile& bin, const MappedFile& index);

// Our own, of tokenized text: "TSTOKENS", version, key (of 16 bytes), width,
// count, xxh3 of the ids, 0; each but the key of 8 bytes.
TokenLayout cache_layout(const MappedFile& file);
constexpr size_t kCacheHeaderBytes = 64;
bool has_cache_header(const MappedFile& file);
// Such a file's first bytes; `xxh3`: of the ids.
std::string cache_header(const Hash128& key, IdType type, int64_t count,
                         uint64_t xxh3);
// The file is whole and was made for `key`.
bool is_cache_of(const MappedFile& file, const Hash128& key);

}  // namespace tessera::data::detail
