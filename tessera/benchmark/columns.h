// Tables for people.
#pragma once

#include <string>
#include <vector>

namespace tessera::benchmark {

using Lines = std::vector<std::vector<std::string>>;

// Columns as wide as their widest word, aligned on the right, behind a "#" in
// the first line, as nccl-tests has them.
std::string aligned(const Lines& lines);

std::string fixed(double value, int decimals);

}  // namespace tessera::benchmark
