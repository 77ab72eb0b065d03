// The files that hold tokenized text: written part by part under another name,
// and there under their own once they are whole.
//
// Who writes holds a lock on the file: what a process that was killed left is
// known by that nobody holds it, on whatever host, and is removed by the next.
// Errors:  TS_CHECK_IO with the path and the system's reason.
// Threads: one a writer; several processes may write the same cache, and the
//          last one to end replaces what the others wrote.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/core/fd.h"
#include "tessera/core/hash.h"
#include "tessera/data/token_ids.h"

namespace tessera::data::detail {

class CacheWriter {
 public:
  // Ids of `type`, kU16 or kU32, for `path`, whose folder is made where it is
  // missing.
  CacheWriter(std::string path, const Hash128& key, IdType type);
  // What was not committed is removed.
  ~CacheWriter();
  CacheWriter(const CacheWriter&) = delete;
  CacheWriter& operator=(const CacheWriter&) = delete;

  void add(std::span<const uint32_t> ids);
  int64_t count() const { return count_; }
  void commit();

 private:
  void create();
  void flush();

  std::string path_, temporary_;
  Hash128 key_;
  IdType type_;
  Fd fd_;
  int64_t count_ = 0;
  std::string buffer_;
};

// Removes what killed processes left half written in the folder.
void remove_leftovers(const std::string& folder);

}  // namespace tessera::data::detail
