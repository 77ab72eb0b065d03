#include "tessera/checkpoint/detail/file_hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera::checkpoint::detail {

struct FileHash::State {
  XXH3_state_t xxh;
};

FileHash::FileHash() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(&state_->xxh);
}
FileHash::~FileHash() = default;

void FileHash::update(const void* data, size_t size) {
  XXH3_128bits_update(&state_->xxh, data, size);
}

Hash128 FileHash::digest() const {
  const XXH128_hash_t value = XXH3_128bits_digest(&state_->xxh);
  return {.low = value.low64, .high = value.high64};
}

}  // namespace tessera::checkpoint::detail
