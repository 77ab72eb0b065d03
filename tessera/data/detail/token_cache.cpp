#include "tessera/data/detail/token_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/data/detail/token_layout.h"

namespace tessera::data::detail {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBufferBytes = size_t{1} << 20;

std::string reason() { return std::generic_category().message(errno); }

}  // namespace

CacheWriter::CacheWriter(std::string path, const Hash128& key, IdType type)
    : path_(std::move(path)), key_(key), type_(type) {
  std::error_code failed;
  fs::create_directories(fs::path(path_).parent_path(), failed);
  TS_CHECK_IO(!failed, path_, ": its folder cannot be made: ", failed.message(),
              ".");
  create();
  // The header, which says how many ids follow, is written at the end.
  buffer_ = cache_header(key_, type_, 0, 0);
}

// Until the lock is held, another process may take the file for a leftover.
void CacheWriter::create() {
  for (;;) {
    FileBeside made = open_beside(path_);
    temporary_ = std::move(made.path);
    fd_ = std::move(made.fd);
    struct stat status{};
    const bool locked = ::flock(fd_.get(), LOCK_EX | LOCK_NB) == 0;
    if (!locked && errno != EWOULDBLOCK) return;  // no locks here
    const bool known = ::fstat(fd_.get(), &status) == 0;
    if (locked && known && status.st_nlink > 0) return;
  }
}

CacheWriter::~CacheWriter() {
  if (fd_.open()) ::unlink(temporary_.c_str());
}

void CacheWriter::add(std::span<const uint32_t> ids) {
  const auto width = static_cast<size_t>(width_of(type_));
  for (const uint32_t id : ids) {  // little-endian: the low bytes come first
    buffer_.append(reinterpret_cast<const char*>(&id), width);
    if (buffer_.size() >= kBufferBytes) flush();
  }
  count_ += static_cast<int64_t>(ids.size());
}

void CacheWriter::flush() {
  std::string_view rest = buffer_;
  while (!rest.empty()) {
    const ssize_t written = ::write(fd_.get(), rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    TS_CHECK_IO(written >= 0, temporary_, ": cannot be written: ", reason(),
                ".");
    rest.remove_prefix(static_cast<size_t>(written));
  }
  buffer_.clear();
}

void CacheWriter::commit() {
  flush();
  const auto ids = [this] {
    const MappedFile written(temporary_);
    return hash64(written.bytes().subspan(kCacheHeaderBytes));
  };
  const std::string header = cache_header(key_, type_, count_, ids());
  TS_CHECK_IO(::pwrite(fd_.get(), header.data(), header.size(), 0) ==
                      static_cast<ssize_t>(header.size()) &&
                  ::fsync(fd_.get()) == 0,
              temporary_, ": cannot be written: ", reason(), ".");
  TS_CHECK_IO(::rename(temporary_.c_str(), path_.c_str()) == 0, path_,
              ": cannot be replaced: ", reason(), ".");
  fd_.reset();
  sync_path(fs::path(path_).parent_path());
}

void remove_leftovers(const std::string& folder) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string path = entry.path().string();
    if (path.find(".cache.tmp-") == std::string::npos) continue;
    const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!file.open()) continue;
    if (::flock(file.get(), LOCK_EX | LOCK_NB) == 0 &&
        ::unlink(path.c_str()) == 0) {
      log::info(path, " was left by a run that was killed: removed");
    }
  }
}

}  // namespace tessera::data::detail
