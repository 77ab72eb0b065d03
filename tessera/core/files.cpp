#include "tessera/core/files.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/log.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string reason() { return std::generic_category().message(errno); }

// An open file and its path.
class OpenFile {
 public:
  OpenFile(const fs::path& path, int flags, mode_t mode = 0)
      : path_(path.string()),
        // A pipe must not hold up who then finds that it is no file.
        fd_(::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, mode)) {
    TS_CHECK_IO(fd_.open(), path_, ": cannot be opened: ", reason(), ".");
  }
  explicit OpenFile(FileBeside&& made)
      : path_(std::move(made.path)), fd_(std::move(made.fd)) {}
  const std::string& path() const { return path_; }
  int get() const { return fd_.get(); }
  Fd release() { return std::move(fd_); }

  // Also refuses what is not a file with a size: a folder, a pipe, a device.
  struct stat status_of_regular_file() const {
    struct stat status{};
    TS_CHECK_IO(::fstat(fd_.get(), &status) == 0, path_, ": ", reason(), ".");
    TS_CHECK_IO(S_ISREG(status.st_mode), path_, ": is not a regular file.");
    return status;
  }
  void write_all(std::string_view content) const {
    while (!content.empty()) {
      const ssize_t written =
          ::write(fd_.get(), content.data(), content.size());
      if (written < 0 && errno == EINTR) continue;
      TS_CHECK_IO(written >= 0, path_, ": cannot be written: ", reason(), ".");
      content.remove_prefix(static_cast<size_t>(written));
    }
  }
  void sync() const {
    TS_CHECK_IO(::fsync(fd_.get()) == 0, path_,
                ": cannot be synced: ", reason(), ".");
  }

 private:
  std::string path_;
  Fd fd_;
};

}  // namespace

std::string read_file(const fs::path& path, uint64_t max_bytes) {
  const OpenFile file(path, O_RDONLY);
  const auto size =
      static_cast<uint64_t>(file.status_of_regular_file().st_size);
  TS_CHECK_IO(size <= max_bytes, path.string(), ": has ", size,
              " bytes; at most ", max_bytes, " are read here.");
  std::string content(size, '\0');
  size_t filled = 0;
  while (filled < content.size()) {
    const ssize_t got =
        ::read(file.get(), content.data() + filled, content.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    TS_CHECK_IO(
        got > 0, path.string(), ": reading stopped after ", filled, " of ",
        size, " bytes: ", got == 0 ? "the file became shorter" : reason(), ".");
    filled += static_cast<size_t>(got);
  }
  return content;
}

void write_file_atomic(const fs::path& to, std::string_view content) {
  std::error_code unknown;
  const auto there = fs::status(to, unknown);
  if (fs::exists(there) && !fs::is_regular_file(there) &&
      !fs::is_directory(there)) {
    // A device or a pipe is written to, never replaced.
    return OpenFile(to, O_WRONLY).write_all(content);
  }
  const fs::path path = fs::is_symlink(to) ? fs::weakly_canonical(to) : to;
  const fs::path folder = path.has_parent_path() ? path.parent_path() : ".";
  std::error_code failed;
  fs::create_directories(folder, failed);
  TS_CHECK_IO(!failed, folder.string(), ": cannot be made: ", failed.message(),
              ".");
  const OpenFile file(open_beside(path));
  try {
    file.write_all(content);
    file.sync();
    TS_CHECK_IO(::rename(file.path().c_str(), path.c_str()) == 0, path.string(),
                ": cannot be replaced: ", reason(), ".");
  } catch (...) {
    ::unlink(file.path().c_str());
    throw;
  }
  sync_path(folder);
}

void sync_path(const fs::path& path) { OpenFile(path, O_RDONLY).sync(); }

fs::path existing_part(const fs::path& path) {
  std::error_code failed;
  fs::path existing = fs::absolute(path, failed);
  TS_CHECK_IO(!failed, path.string(), ": ", failed.message(), ".");
  while (!fs::exists(existing, failed) && existing.has_relative_path()) {
    existing = existing.parent_path();
  }
  return existing;
}

uint64_t free_bytes(const fs::path& path) {
  std::error_code failed;
  const fs::path existing = existing_part(path);
  const auto space = fs::space(existing, failed);
  TS_CHECK_IO(!failed, existing.string(), ": ", failed.message(), ".");
  return space.available;
}

bool on_one_disk(const fs::path& one, const fs::path& other) {
  struct stat of_one{}, of_other{};
  return ::stat(existing_part(one).c_str(), &of_one) == 0 &&
         ::stat(existing_part(other).c_str(), &of_other) == 0 &&
         of_one.st_dev == of_other.st_dev;
}

bool lies_in_memory(const fs::path& path) {
  struct statfs system{};
  return ::statfs(path.c_str(), &system) == 0 &&
         (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC);
}

fs::path temporary_files() {
  std::error_code failed;
  fs::path folder = fs::temp_directory_path(failed);
  TS_CHECK_IO(!failed, "no folder for temporary files (TMPDIR, or /tmp): ",
              failed.message(), ". Set TMPDIR to one that may be written.");
  return folder;
}

MappedFile::MappedFile(const fs::path& path) : path_(path.string()) {
  const OpenFile file(path, O_RDONLY);
  const struct stat status = file.status_of_regular_file();
  size_ = static_cast<uint64_t>(status.st_size);
  device_ = status.st_dev;
  inode_ = status.st_ino;
  if (size_ == 0) return;
  void* memory = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.get(), 0);
  TS_CHECK_IO(memory != MAP_FAILED, path_, ": cannot be mapped: ", reason(),
              ".");
  data_ = static_cast<const std::byte*>(memory);
}

// A file that was removed or replaced lives on as long as it is mapped.
void MappedFile::require_whole() const {
  struct stat status{};
  if (data_ == nullptr || ::stat(path_.c_str(), &status) != 0) return;
  if (status.st_dev != device_ || status.st_ino != inode_) return;
  TS_CHECK_IO(static_cast<uint64_t>(status.st_size) >= size_, path_,
              ": has become shorter: ", status.st_size, " bytes, and ", size_,
              " when it was opened. Do not change data while it is in use.");
}

namespace {

void advise(std::span<const std::byte> pages, int advice) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): madvise asks for it.
  ::madvise(const_cast<std::byte*>(pages.data()), pages.size(), advice);
}

}  // namespace

// Advice: what cannot be had ahead is read when it is needed.
void MappedFile::will_need(std::span<const std::byte> part) const {
  static const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  if (part.empty()) return;
  const auto begin = static_cast<size_t>(part.data() - data_) / page * page;
  const auto end = static_cast<size_t>(part.data() - data_) + part.size();
  advise({data_ + begin, end - begin}, MADV_WILLNEED);
}

void MappedFile::let_go() const {
  if (data_) advise(bytes(), MADV_DONTNEED);
}

MappedFile::~MappedFile() {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): munmap asks for it.
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      device_(other.device_),
      inode_(other.inode_),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(device_, other.device_);
  std::swap(inode_, other.inode_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

PartsOfFile::PartsOfFile(const fs::path& path) : path_(path.string()) {
  OpenFile file(path, O_RDONLY);
  size_ = static_cast<uint64_t>(file.status_of_regular_file().st_size);
  file_ = file.release();
}

void PartsOfFile::read(uint64_t at, std::span<std::byte> into) const {
  while (!into.empty()) {
    const ssize_t got =
        ::pread(file_.get(), into.data(), into.size(), static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    TS_CHECK_IO(got > 0, path_, ": cannot be read at byte ", at, ": ",
                got == 0 ? "the file became shorter" : reason(), ".");
    at += static_cast<uint64_t>(got);
    into = into.subspan(static_cast<size_t>(got));
  }
}

void refuse_irregular(const fs::path& path) {
  std::error_code none;
  const auto found = fs::status(path, none);
  TS_CHECK_IO(!fs::exists(found) || fs::is_regular_file(found), path.string(),
              ": is no regular file. Remove it.");
}

FileBeside open_beside(const fs::path& path) {
  static std::atomic<uint64_t> count{0};
  for (;;) {
    std::string name = path.string() + ".tmp-" + std::to_string(::getpid()) +
                       "-" + std::to_string(count++);
    Fd fd(::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    // Of an earlier process: in containers all have the same number.
    if (!fd.open() && errno == EEXIST) continue;
    TS_CHECK_IO(fd.open(), name, ": cannot be made: ", reason(), ".");
    return {std::move(name), std::move(fd)};
  }
}

FileLock::FileLock(const fs::path& path, const std::string& words) {
  const bool is_folder = fs::is_directory(path);
  OpenFile file(path, is_folder ? O_RDONLY : O_RDWR | O_CREAT, 0666);
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    TS_CHECK_IO(errno != EWOULDBLOCK, path.string(),
                ": held by another process: ",
                is_folder ? words : read_file(path, /*max_bytes=*/4096));
    log::warning(path.string(), ": cannot be locked: ", reason(),
                 ". See to it that no other run writes there.");
    return;
  }
  if (!is_folder) {
    TS_CHECK_IO(::ftruncate(file.get(), 0) == 0, path.string(),
                ": cannot be written: ", reason(), ".");
    file.write_all(words);
  }
  file_ = file.release();
}

void remove_whole(const fs::path& path) {
  constexpr int kTries = 20;  // what is new comes in between
  std::error_code error;
  for (int i = 0; i < kTries; ++i) {
    fs::remove_all(path, error);
    if (error != std::errc::directory_not_empty && !fs::exists(path, error)) {
      return;
    }
  }
}

TemporaryFolder::TemporaryFolder(const std::string& prefix,
                                 const fs::path& in) {
  std::string name = (in / (prefix + "-XXXXXX")).string();
  TS_CHECK_IO(::mkdtemp(name.data()) != nullptr, name,
              ": cannot be made: ", reason(), ".");
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() { remove_whole(path_); }

}  // namespace tessera
