#include "tessera/checkpoint/detail/posix_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/units.h"

namespace tessera::checkpoint::detail {

std::string describe_errno(int code) {
  const char* name = strerrorname_np(code);
  return std::string(strerrordesc_np(code) != nullptr ? strerrordesc_np(code)
                                                      : "unknown error") +
         " (" + (name != nullptr ? name : std::to_string(code)) + ")";
}

NewFile::NewFile(std::string path) : path_(std::move(path)) {
  fd_.reset(
      ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  TS_CHECK_IO(fd_.open(), path_,
              ": cannot be created: ", describe_errno(errno));
}

NewFile::~NewFile() {
  if (!closed_) ::unlink(path_.c_str());
}

void NewFile::write(const void* data, size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  for (size_t done = 0; done < size;) {
    const ssize_t count = ::write(fd_.get(), bytes + done, size - done);
    if (count < 0 && errno == EINTR) continue;
    TS_CHECK_IO(count > 0, path_, ": writing ", size - done, " bytes at byte ",
                bytes_,
                " failed: ", describe_errno(count < 0 ? errno : ENOSPC));
    done += static_cast<size_t>(count);
    bytes_ += count;
  }
}

void NewFile::close() {
  TS_CHECK_IO(::fsync(fd_.get()) == 0, path_, ": syncing ", bytes_,
              " bytes failed: ", describe_errno(errno));
  const int result = ::close(fd_.release());
  TS_CHECK_IO(result == 0, path_, ": closing after ", bytes_,
              " bytes failed: ", describe_errno(errno));
  closed_ = true;
}

void require_room(const std::string& folder, int64_t bytes) {
  const uint64_t room = free_bytes(folder);
  TS_CHECK_IO(std::cmp_less_equal(bytes, room), folder, ": has ",
              bytes_text(room), " free, and the checkpoint needs ",
              bytes_text(bytes), ": ", describe_errno(ENOSPC));
}

void rename_path(const std::string& from, const std::string& to) {
  TS_CHECK_IO(::rename(from.c_str(), to.c_str()) == 0, from,
              ": cannot be renamed to ", to, ": ", describe_errno(errno));
}

}  // namespace tessera::checkpoint::detail
