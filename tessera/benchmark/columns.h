// Tables for people.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace tessera::benchmark {

using Lines = std::vector<std::vector<std::string>>;

// Columns as wide as their widest word, aligned on the right, behind a "#" in
// the first line, as nccl-tests has them.
std::string aligned(const Lines& lines);
// One line of a table whose widths are known beforehand: a word that is wider
// than its column takes what it needs.
std::string in_columns(const std::vector<std::string>& words,
                       std::span<const size_t> widths);

}  // namespace tessera::benchmark
