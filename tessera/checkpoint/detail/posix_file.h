// Files that are written to last: every call is checked, and an error names the
// path, the bytes and the code (ENOSPC, EIO, ...).
#pragma once

#include <cstdint>
#include <string>

#include "tessera/core/fd.h"

namespace tessera::checkpoint::detail {

// A new file; removed again unless close() was reached.
class NewFile {
 public:
  // REQUIRES: nothing exists at `path`.
  explicit NewFile(std::string path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, size_t size);
  // Syncs to the disk and closes.
  void close();
  int64_t bytes() const { return bytes_; }

 private:
  std::string path_;
  Fd fd_;
  int64_t bytes_ = 0;
  bool closed_ = false;
};

// Throws unless `folder` has so many bytes free for a checkpoint.
void require_room(const std::string& folder, int64_t bytes);

// Throws with path and errno.
void rename_path(const std::string& from, const std::string& to);
// "No space left on device (ENOSPC)".
std::string describe_errno(int code);

}  // namespace tessera::checkpoint::detail
