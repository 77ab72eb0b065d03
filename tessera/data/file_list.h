// From the paths, folders and globs of a configuration to files.
//
// Globs: * ? [abc] within a name; ** for any number of folders.
// Order: as listed; what one glob or folder gives is sorted by name, so that it
//        is the same on every rank. Of a folder all files are taken, also those
//        in folders below it; names that begin with a dot are passed over,
//        and so are empty files unless they are named.
// Leaving out: a file goes where a glob of `exclude` matches its name or a part
//        of its path: "*.png", "drafts" (also a folder), "drafts/*.txt".
// Errors: TS_CHECK_CONFIG names the pattern that matches no file, or cannot be
//         read; TS_CHECK_IO what was found and cannot be looked at, but for
//         links that lead in circles: they are passed over.
#pragma once

#include <string>
#include <vector>

namespace tessera::data {

// `key` is the configuration's, for messages: "data.train".
std::vector<std::string> expand_paths(
    const std::vector<std::string>& patterns, const std::string& key,
    const std::vector<std::string>& exclude = {});

}  // namespace tessera::data
