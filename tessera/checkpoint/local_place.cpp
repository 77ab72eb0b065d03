#include "tessera/checkpoint/local_place.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <sstream>
#include <system_error>
#include <utility>

#include "tessera/checkpoint/detail/local_steps.h"
#include "tessera/checkpoint/detail/posix_file.h"
#include "tessera/checkpoint/detail/step_folders.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/hash.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"

namespace tessera::checkpoint {
namespace detail {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIdFile = "/local-id";
constexpr const char* kPrefix = "tessera-";
constexpr const char* kOwnerFile = "/run";  // whose a folder is
constexpr size_t kIdDigits = 32;

bool is_id(const std::string& text) {
  return text.size() == kIdDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

// A copy of the folder has another one.
uint64_t inode_of(const std::string& path) {
  struct stat found{};
  TS_CHECK_IO(::stat(path.c_str(), &found) == 0, path, ": ",
              describe_errno(errno));
  return found.st_ino;
}

std::string owner_text(const std::string& checkpoints) {
  return fs::weakly_canonical(checkpoints).string() + "\n";
}

// A folder of this user, which is no link.
bool is_own_folder(const std::string& path) {
  struct stat found{};
  return ::lstat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode) &&
         found.st_uid == ::geteuid();
}

// Those in local_dir that this run made, under whatever path it was.
std::vector<std::string> folders_of(const LocalPlace& place) {
  const std::string owner = owner_text(place.checkpoints);
  const std::string named = local_checkpoint_folder(place);
  std::vector<std::string> folders;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(place.local_dir, none)) {
    const std::string path = entry.path();
    if (!entry.path().filename().string().starts_with(kPrefix) ||
        !is_own_folder(path)) {
      continue;
    }
    try {
      if (path == named || read_file(path + kOwnerFile) == owner) {
        folders.push_back(path);
      }
    } catch (const Error& error) {  // being made or removed by another run
      log::debug("no owner: ", message_of(error));
    }
  }
  return folders;
}

}  // namespace

LocalId read_local_id(const std::string& checkpoints) {
  const std::string file = checkpoints + kIdFile;
  if (!fs::exists(file)) return {};
  std::istringstream text(read_file(file));
  LocalId named;
  uint64_t inode = 0;
  TS_CHECK_IO(text >> named.id >> inode && is_id(named.id) &&
                  std::getline(text >> std::ws, named.local_dir),
              file,
              ": must be 32 hexadecimal digits, the inode of its folder and "
              "checkpoint.local_dir. Remove it to go on without the "
              "checkpoints in the memory of hosts.");
  if (inode == inode_of(checkpoints)) return named;
  return {.is_copied = true};
}

void write_local_id(const LocalPlace& place, const std::string& id) {
  write_file_atomic(place.checkpoints + kIdFile,
                    c10::str(id, " ", inode_of(place.checkpoints), " ",
                             place.local_dir, "\n"));
}

void remove_local_id(const std::string& checkpoints) {
  fs::remove(checkpoints + kIdFile);
}

std::string new_local_id() {
  std::random_device random;
  const auto word = [&] { return uint64_t{random()} << 32 | random(); };
  return to_hex(Hash128{.low = word(), .high = word()});
}

std::string folder_of_id(const std::string& local_dir, const std::string& id) {
  return local_dir + "/" + kPrefix + id;
}

void take_folder(const LocalPlace& place, const std::string& folder) {
  fs::create_directories(place.local_dir);
  constexpr mode_t kOnlyOwn = 0700;
  TS_CHECK_IO(::mkdir(folder.c_str(), kOnlyOwn) == 0 || errno == EEXIST, folder,
              ": cannot be made: ", describe_errno(errno));
  TS_CHECK_IO(is_own_folder(folder), folder,
              ": is no folder of this user. Remove ", place.checkpoints,
              kIdFile, " to go on without what it has.");
  const std::string file = folder + kOwnerFile;
  const std::string owner = owner_text(place.checkpoints);
  if (fs::exists(file) && read_file(file) == owner) return;
  write_file_atomic(file, owner);
}

void remove_other_folders(const LocalPlace& place, const std::string& kept) {
  for (const std::string& path : folders_of(place)) {
    if (path == kept) continue;
    std::error_code failed;
    try {
      const FileLock lock(path, "it stays");
      // Whose it is goes last: a start that is killed here is followed by one
      // that still knows it.
      for (fs::directory_iterator each(path, failed), end; each != end;
           each.increment(failed)) {
        if (each->path() != path + kOwnerFile) {
          fs::remove_all(each->path(), failed);
        }
      }
      fs::remove_all(path, failed);
    } catch (const Error& error) {
      log::info(message_of(error));
      continue;
    }
    if (!failed) continue;
    log::warning(path, ": cannot be removed: ", failed.message(),
                 ". It holds memory until it is.");
  }
}

std::vector<LocalStep> local_steps(const std::string& folder) {
  std::vector<LocalStep> steps;
  if (!is_own_folder(folder)) return steps;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto step = step_of_name(entry.path().filename());
    if (!step || !fs::exists(entry.path() / kManifestName)) continue;
    try {
      const Manifest manifest = read_manifest_alone(entry.path());
      steps.push_back({.step = *step,
                       .base_step = manifest.parent,
                       .base_sequence = manifest.sequence - 1,
                       .manifest_hash = hash64(format_manifest(manifest))});
    } catch (const Error& error) {
      log::warning("checkpoint: ", entry.path().string(),
                   " is not used: ", message_of(error));
    }
  }
  return steps;
}

void remove_other_steps(const std::string& folder, int64_t step) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto found = step_of_name(entry.path().filename());
    if (!found || *found == step) continue;
    // The manifest first: what is left of an interrupted removal is none.
    fs::remove(entry.path() / kManifestName);
    fs::remove_all(entry.path());
  }
}

void remove_unfinished(const std::string& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (step_of_name(entry.path().filename()) &&
        !fs::exists(entry.path() / kManifestName)) {
      fs::remove_all(entry.path());
    }
  }
}

Base base_in(const std::string& checkpoints) {
  Base base;
  for (const auto& found : list_checkpoints(checkpoints)) {
    if (found.complaint.empty()) {
      base.step = found.step;
      base.sequence = found.sequence;
      break;
    }
    base.unreadable.push_back(found.step);
  }
  return base;
}

bool is_newer(const LocalStep& local, const Base& base) {
  // Nothing came since, though the line may have begun at an older one.
  if (base.sequence == local.base_sequence && base.step == local.base_step) {
    return true;
  }
  // The same line was saved there since, as it was already being written then
  // (checkpoint.async) or behind this one.
  if (base.sequence > local.base_sequence) return local.step > *base.step;
  // What it goes on from cannot be read, or was removed: somebody went back.
  return local.base_step &&
         std::ranges::count(base.unreadable, *local.base_step) > 0 &&
         (!base.step || local.step > *base.step);
}

}  // namespace detail

bool has_local_checkpoints(const std::string& checkpoints) {
  return !detail::read_local_id(checkpoints).id.empty();
}

std::string forget_local_checkpoints(const std::string& checkpoints) {
  const detail::LocalId named = detail::read_local_id(checkpoints);
  detail::remove_local_id(checkpoints);
  return named.id.empty() ? ""
                          : detail::folder_of_id(named.local_dir, named.id);
}

std::string local_checkpoint_folder(const LocalPlace& place) {
  const std::string id = detail::read_local_id(place.checkpoints).id;
  if (id.empty()) return "";
  const std::string folder = detail::folder_of_id(place.local_dir, id);
  return detail::is_own_folder(folder) ? folder : "";
}

bool is_used(const std::string& folder) {
  try {
    const FileLock lock(folder, "a run goes on there");
    return false;
  } catch (const Error&) {
    return true;
  }
}

std::string newest_local_checkpoint(const LocalPlace& place) {
  const std::string folder = local_checkpoint_folder(place);
  if (folder.empty()) return "";
  const detail::Base base = detail::base_in(place.checkpoints);
  int64_t newest = -1;
  for (const detail::LocalStep& found : detail::local_steps(folder)) {
    if (detail::is_newer(found, base)) newest = std::max(newest, found.step);
  }
  return newest < 0 ? "" : folder + "/" + detail::step_name(newest);
}

void require_local_space(const LocalPlace& place, int64_t bytes) {
  namespace fs = std::filesystem;
  constexpr const char* kWayOut =
      ". Set checkpoint.local_dir to a folder of each host's own memory or "
      "disk, or checkpoint.local_every to 0.";
  const std::string parent = existing_part(place.local_dir);
  TS_CHECK_CONFIG(fs::is_directory(parent), "checkpoint.local_dir: ", parent,
                  " is no folder", kWayOut);
  TS_CHECK_CONFIG(::access(parent.c_str(), W_OK | X_OK) == 0,
                  "checkpoint.local_dir: ", parent, ": ", std::strerror(errno),
                  kWayOut);
  std::error_code none;
  for (const std::string& folder : detail::folders_of(place)) {
    for (const auto& entry : fs::recursive_directory_iterator(folder, none)) {
      if (!entry.is_regular_file(none)) continue;
      bytes -= static_cast<int64_t>(entry.file_size(none));
    }
  }
  const uint64_t room = free_bytes(parent);
  TS_CHECK_CONFIG(std::cmp_less_equal(bytes, room),
                  "checkpoint.local_dir: ", place.local_dir, " has ",
                  bytes_text(room), " free, but two checkpoints of this host ",
                  "need ", bytes_text(bytes), kWayOut);
}

}  // namespace tessera::checkpoint
