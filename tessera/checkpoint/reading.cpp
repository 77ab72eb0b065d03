#include "tessera/checkpoint/reading.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>

#include "tessera/checkpoint/detail/posix_file.h"
#include "tessera/checkpoint/detail/step_folders.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

std::string manifest_of(const std::string& step_folder) {
  return step_folder + "/" + kManifestName;
}

// False: somebody else has it. A file system without locks gives it to all.
bool lock(const Fd& file, int how) {
  return ::flock(file.get(), how | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

}  // namespace

Reading::Reading(const std::string& step_folder)
    : manifest_(
          ::open(manifest_of(step_folder).c_str(), O_RDONLY | O_CLOEXEC)) {
  TS_CHECK_IO(manifest_.open(), manifest_of(step_folder),
              ": cannot be opened: ", detail::describe_errno(errno));
  struct stat own{}, there{};
  const bool stays = lock(manifest_, LOCK_SH) &&
                     ::fstat(manifest_.get(), &own) == 0 &&
                     ::stat(manifest_of(step_folder).c_str(), &there) == 0 &&
                     own.st_ino == there.st_ino;
  TS_CHECK_IO(stays, step_folder,
              ": is being removed by the run that saved it. Take a newer one.");
}

bool remove_unless_read(const std::string& folder, int64_t step) {
  {
    // NFS locks for one alone what is open for writing; and what is open there
    // cannot be removed.
    const Fd manifest(::open(manifest_of(step_folder(folder, step)).c_str(),
                             O_RDWR | O_CLOEXEC));
    if (manifest.open() && !lock(manifest, LOCK_EX)) return false;
    detail::set_step_aside(folder, step);
  }
  detail::remove_set_aside(folder, step);
  return true;
}

}  // namespace tessera::checkpoint
