#include "tessera/data/file_list.h"

#include <fnmatch.h>

#include <algorithm>
#include <filesystem>

#include "tessera/core/error.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

bool has_wildcard(const std::string& text) {
  return text.find_first_of("*?[") != std::string::npos;
}

bool is_hidden(const fs::path& path) {
  return path.filename().string().starts_with('.');
}

std::vector<fs::path> sorted_entries(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> entries;
  for (fs::directory_iterator entry(folder, error), end; entry != end;
       entry.increment(error)) {
    if (!is_hidden(entry->path())) entries.push_back(entry->path());
  }
  TS_CHECK_IO(!error, folder.string(), ": cannot be listed: ", error.message());
  std::sort(entries.begin(), entries.end());
  return entries;
}

// `status`: of what a folder or a glob has. Links that lead in circles lead
// nowhere; what else cannot be looked at is not passed over.
fs::file_type known_type(const fs::path& path, fs::file_status status,
                         const std::error_code& error) {
  TS_CHECK_IO(status.type() != fs::file_type::none ||
                  error == std::errc::too_many_symbolic_link_levels,
              path.string(), ": cannot be looked at: ", error.message(), ".");
  return status.type();
}

fs::file_type type_of(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  return known_type(path, status, error);
}

bool is_there(const fs::path& path) {
  return fs::exists(fs::file_status(type_of(path)));
}

bool is_folder(const fs::path& path) {
  return type_of(path) == fs::file_type::directory;
}

// Links to folders are not followed below a folder: they may lead in circles.
bool is_real_folder(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  return known_type(path, status, error) == fs::file_type::directory;
}

// Links that lead nowhere, or in circles, have none.
bool has_content(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error) && fs::file_size(path, error) > 0;
}

void add_folder(const fs::path& folder, std::vector<std::string>& files) {
  for (const fs::path& entry : sorted_entries(folder)) {
    if (is_real_folder(entry)) {
      add_folder(entry, files);
    } else if (has_content(entry)) {
      files.push_back(entry.string());
    }
  }
}

using Parts = fs::path::const_iterator;

// Files under `base` that the parts of a glob from `part` on lead to.
void add_matches(const fs::path& base, Parts part, Parts end,
                 std::vector<std::string>& files) {
  if (part == end) {
    if (has_content(base)) files.push_back(base.string());
    return;
  }
  const std::string name = part->string();
  const Parts rest = std::next(part);
  if (!has_wildcard(name)) {
    const fs::path next = base.empty() ? *part : base / *part;
    if (is_there(next)) add_matches(next, rest, end, files);
    return;
  }
  const fs::path folder = base.empty() ? fs::path(".") : base;
  if (!is_folder(folder)) return;
  if (name == "**") add_matches(base, rest, end, files);
  for (const fs::path& entry : sorted_entries(folder)) {
    const fs::path next = base / entry.filename();
    if (name == "**") {
      if (is_real_folder(next)) add_matches(next, part, end, files);
    } else if (::fnmatch(name.c_str(), entry.filename().c_str(), 0) == 0) {
      add_matches(next, rest, end, files);
    }
  }
}

// What a Megatron pair begins with.
bool is_prefix(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(path + ".bin", error) &&
         fs::is_regular_file(path + ".idx", error);
}

// What is there by this name.
fs::file_type given_type(const std::string& pattern, const std::string& key) {
  std::error_code error;
  const fs::file_type type = fs::status(pattern, error).type();
  if (type != fs::file_type::none) return type;
  // Of a glob add_matches() looks at every part.
  TS_CHECK_CONFIG(has_wildcard(pattern), key, ": '", pattern,
                  "' cannot be read: ", error.message(), ".");
  return fs::file_type::not_found;
}

// `type`: given_type().
std::vector<std::string> expand(const std::string& pattern,
                                fs::file_type type) {
  const bool exists = type != fs::file_type::not_found;
  std::vector<std::string> files;
  if (type == fs::file_type::directory) {
    add_folder(pattern, files);
  } else if (exists || !has_wildcard(pattern)) {
    if (exists || is_prefix(pattern)) files.push_back(pattern);
  } else {
    const fs::path path(pattern);
    add_matches({}, path.begin(), path.end(), files);
    // A file may be reached in several ways where ** is there twice.
    std::sort(files.begin(), files.end());
    files.erase(std::unique(files.begin(), files.end()), files.end());
  }
  return files;
}

// The glob's parts match those of the path that begin at `part`; what follows
// lies below a folder that matches.
bool begins_with_match(Parts glob, Parts glob_end, Parts part, Parts end) {
  if (glob == glob_end) return true;
  if (*glob == "**") {
    for (Parts next = part;; ++next) {
      if (begins_with_match(std::next(glob), glob_end, next, end)) return true;
      if (next == end) return false;
    }
  }
  return part != end &&
         ::fnmatch(glob->c_str(), part->c_str(), FNM_PERIOD) == 0 &&
         begins_with_match(std::next(glob), glob_end, std::next(part), end);
}

bool is_left_out(const fs::path& file, const fs::path& glob) {
  for (Parts part = file.begin(); part != file.end(); ++part) {
    if (begins_with_match(glob.begin(), glob.end(), part, file.end())) {
      return true;
    }
  }
  return false;
}

fs::path glob_of(const std::string& text) {
  fs::path glob = fs::path(text).lexically_normal();
  return glob.has_filename() ? glob : glob.parent_path();  // "drafts/"
}

// How many were left out.
size_t leave_out(std::vector<std::string>& files,
                 const std::vector<std::string>& exclude) {
  return std::erase_if(files, [&](const std::string& file) {
    return std::ranges::any_of(exclude, [&](const std::string& glob) {
      return is_left_out(fs::path(file).lexically_normal(), glob_of(glob));
    });
  });
}

}  // namespace

std::vector<std::string> expand_paths(const std::vector<std::string>& patterns,
                                      const std::string& key,
                                      const std::vector<std::string>& exclude) {
  for (const std::string& glob : exclude) {
    TS_CHECK_CONFIG(!glob_of(glob).empty(),
                    "data.exclude: \"\" would leave out every file. Remove it, "
                    "or give the name of what is to be left out.");
  }
  std::vector<std::string> files;
  for (const std::string& pattern : patterns) {
    TS_CHECK_CONFIG(!pattern.empty(), key,
                    ": '' names no file. Remove it; [] clears the key.");
    const fs::file_type type = given_type(pattern, key);
    const bool has_folder = type == fs::file_type::directory;
    TS_CHECK_CONFIG(type == fs::file_type::not_found || has_folder ||
                        type == fs::file_type::regular,
                    key, ": '", pattern,
                    "' is a pipe or a device, no file: data is read more than "
                    "once. Write it to a file first.");
    std::vector<std::string> found = expand(pattern, type);
    TS_CHECK_CONFIG(!found.empty(), key, ": '", pattern, "' ",
                    has_folder              ? "has no file with content."
                    : has_wildcard(pattern) ? "matches no file with content."
                                            : "does not exist.",
                    " The current folder is ", fs::current_path().string(),
                    ".");
    const size_t left_out = leave_out(found, exclude);
    TS_CHECK_CONFIG(!found.empty(), key, ": data.exclude leaves out all ",
                    left_out, " files of '", pattern, "'.");
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

}  // namespace tessera::data
