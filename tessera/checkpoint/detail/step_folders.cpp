#include "tessera/checkpoint/detail/step_folders.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <vector>

#include "tessera/checkpoint/detail/posix_file.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"

namespace tessera::checkpoint::detail {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";

void remove_tree(const fs::path& path) {
  std::error_code failed;
  fs::remove_all(path, failed);
  TS_CHECK_IO(!failed, path.string(),
              ": cannot be removed: ", describe_errno(failed.value()));
}

// Files that are still read over a network cannot go yet.
void remove_or_tell(const fs::path& path) {
  try {
    remove_tree(path);
  } catch (const Error& error) {
    log::warning("checkpoint: a leftover stays: ", message_of(error));
  }
}

std::vector<fs::path> leftovers_in(const std::string& folder) {
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (is_leftover(entry.path().filename())) leftovers.push_back(entry.path());
  }
  return leftovers;
}

// As free space counts them: a file that was not written to its end holds fewer
// than its size.
int64_t bytes_on_disk(const fs::path& path) {
  struct stat found{};
  constexpr int64_t kUnit = 512;  // of st_blocks
  return ::lstat(path.c_str(), &found) == 0 ? found.st_blocks * kUnit : 0;
}

}  // namespace

std::string step_name(int64_t step) {
  return std::string(kPrefix) + std::to_string(step);
}

std::optional<int64_t> step_of_name(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int64_t step = -1;
  const char* end = name.data() + name.size();
  const auto result = std::from_chars(name.data() + kPrefix.size(), end, step);
  const bool number = result.ec == std::errc() && result.ptr == end &&
                      step >= 0 && step_name(step) == name;
  return number ? std::optional(step) : std::nullopt;
}

bool is_leftover(const std::string& name) {
  return (name.starts_with(kPrefix) && name.ends_with(".tmp")) ||
         name.starts_with("latest.tmp-") || name.starts_with("best.tmp-") ||
         name.starts_with("resumed-from.tmp-") ||
         name.starts_with("rewound.tmp-") || name.starts_with("local-id.tmp-");
}

std::string last_part(const std::string& path) {
  const fs::path lexical = fs::path(path).lexically_normal();
  return lexical.has_filename() ? lexical.filename().string()
                                : lexical.parent_path().filename().string();
}

void remove_leftovers(const std::string& folder) {
  for (const fs::path& path : leftovers_in(folder)) {
    remove_or_tell(path);
  }
}

int64_t bytes_of_leftovers(const std::string& folder) {
  if (!fs::is_directory(folder)) return 0;
  int64_t bytes = 0;
  for (const fs::path& path : leftovers_in(folder)) {
    bytes += bytes_on_disk(path);
    std::error_code none;
    for (const auto& inside : fs::recursive_directory_iterator(path, none)) {
      bytes += bytes_on_disk(inside.path());
    }
  }
  return bytes;
}

void commit_step(const std::string& folder, const std::string& temporary,
                 int64_t step) {
  const std::string final_path = folder + "/" + step_name(step);
  if (!fs::exists(final_path)) {
    rename_path(temporary, final_path);
  } else if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD,
                         final_path.c_str(), RENAME_EXCHANGE) == 0) {
    sync_path(folder);
    remove_or_tell(temporary);
  } else {
    // Not every file system exchanges: then there is a moment without step N.
    const std::string replaced = final_path + ".replaced.tmp";
    rename_path(final_path, replaced);
    try {
      rename_path(temporary, final_path);
    } catch (const Error&) {
      ::rename(replaced.c_str(), final_path.c_str());
      throw;
    }
    sync_path(folder);
    remove_or_tell(replaced);
  }
  sync_path(folder);
}

void name_latest(const std::string& folder, int64_t step) {
  write_file_atomic(folder + "/latest", step_name(step) + "\n");
}

void set_step_aside(const std::string& folder, int64_t step) {
  const std::string path = folder + "/" + step_name(step);
  rename_path(path, path + ".tmp");
}

void remove_set_aside(const std::string& folder, int64_t step) {
  remove_tree(folder + "/" + step_name(step) + ".tmp");
}

void remove_step(const std::string& folder, int64_t step) {
  set_step_aside(folder, step);
  remove_set_aside(folder, step);
}

}  // namespace tessera::checkpoint::detail
