// XXH3-128 of a file's bytes while they pass by.
#pragma once

#include <cstddef>
#include <memory>

#include "tessera/core/hash.h"

namespace tessera::checkpoint::detail {

class FileHash {
 public:
  FileHash();
  ~FileHash();

  void update(const void* data, size_t size);
  // Of all bytes so far; equal to hash128() of them.
  Hash128 digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::checkpoint::detail
