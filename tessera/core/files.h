// Files: read whole, mapped, written so that a crash leaves the old or the new
// one and never a part.
//
// Errors:  TS_CHECK_IO with the path and the system's reason.
// Threads: any; a MappedFile may be read by several at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "tessera/core/fd.h"

namespace tessera {

// The whole of a regular file. Refused above `max_bytes`.
std::string read_file(const std::filesystem::path& path,
                      uint64_t max_bytes = uint64_t{4} << 30);

// Writes beside `path`, syncs, renames over it and syncs the folder. Missing
// folders are made.
void write_file_atomic(const std::filesystem::path& path,
                       std::string_view content);

// Throws where there is something at `path` that is no regular file: opening a
// pipe may block for ever.
void refuse_irregular(const std::filesystem::path& path);

// Flushes a file or a folder to the disk.
void sync_path(const std::filesystem::path& path);

// Free bytes for this user where `path` (or its nearest parent that exists)
// lies.
uint64_t free_bytes(const std::filesystem::path& path);
// The path, or the nearest folder above it that is there.
std::filesystem::path existing_part(const std::filesystem::path& path);
// Whether two paths, or what is there of them, are of one file system.
bool on_one_disk(const std::filesystem::path& one,
                 const std::filesystem::path& other);
// Whether the file system of an existing path keeps its files in memory.
bool lies_in_memory(const std::filesystem::path& path);
// The system's folder for temporary files: TMPDIR, or /tmp.
std::filesystem::path temporary_files();

// A regular file as read-only memory. An empty file gives an empty span.
// A file that is cut short while it is mapped, or whose disk fails, kills the
// reader (SIGBUS), as with every mapping: check size() against what the format
// promises first, and call require_whole() before reads of a file that others
// may write to. No descriptor is kept: as many files may be mapped as memory
// has room for.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  uint64_t size() const { return size_; }
  const std::string& path() const { return path_; }
  // Throws where the file has become shorter than it was when it was mapped.
  void require_whole() const;
  // Asks for bytes that will be read soon: the system reads them meanwhile.
  void will_need(std::span<const std::byte> part) const;
  // What was read may leave this process's memory: it is read again where it is
  // needed.
  void let_go() const;

 private:
  std::string path_;
  uint64_t device_ = 0, inode_ = 0;  // what tells the file from another
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// A regular file, read by parts: a disk that gives no more is an error here,
// and ends who reads a mapping.
class PartsOfFile {
 public:
  explicit PartsOfFile(const std::filesystem::path& path);

  // When it was opened.
  uint64_t size() const { return size_; }
  void read(uint64_t at, std::span<std::byte> into) const;

 private:
  std::string path_;
  Fd file_;
  uint64_t size_ = 0;
};

// A new file beside `path`, open to read and write, of a name that no other
// process or thread uses: "PATH.tmp-PID-N". Who opened it removes it.
struct FileBeside {
  std::string path;
  Fd fd;
};
FileBeside open_beside(const std::filesystem::path& path);

// Held by one process of this host at a time, until it is destroyed or the
// process ends, however it ends. The file stays.
class FileLock {
 public:
  // TS_CHECK_IO where another holds it, in the words that the other left there;
  // `words` are left for others. Of a folder, in which nothing is left, they
  // are said by who finds it held. Where the file system knows no locks,
  // nothing is held, and a warning says so.
  FileLock(const std::filesystem::path& path, const std::string& words);

 private:
  Fd file_;
};

// With all that is in it, also where somebody still writes there; what cannot
// be removed stays.
void remove_whole(const std::filesystem::path& path);

// A folder with a name that nobody else has, removed with all that is in it.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& prefix = "tessera",
                           const std::filesystem::path& in = temporary_files());
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // The path of a file in it, as a string.
  std::string file(const std::string& name) const {
    return (path_ / name).string();
  }

 private:
  std::filesystem::path path_;
};

}  // namespace tessera
