// The bytes of a file, decompressed where it is gzip or Zstandard: told by its
// first bytes, which no text in UTF-8 has.
//
// Errors:  TS_CHECK_IO names the file and the byte where it is damaged or cut
//          off.
// Threads: one a reader.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "tessera/core/files.h"

namespace tessera::data::detail {

bool is_compressed(const MappedFile& file);

class ByteReader {
 public:
  virtual ~ByteReader() = default;
  // Fills `out` from its front; fewer bytes than it has, or none, at the end.
  virtual size_t read(std::span<char> out) = 0;
  // Bytes of the file that have been used up, for whoever shows progress.
  virtual uint64_t consumed() const = 0;
};

// REQUIRES: `file` outlives the reader.
std::unique_ptr<ByteReader> open_bytes(const MappedFile& file);

}  // namespace tessera::data::detail
