// Columns of text.
#pragma once

#include <string>
#include <vector>

namespace tessera::benchmark {

std::string fixed(double value, int decimals);

// Columns as wide as their widest word, aligned on the right, behind a "#" in
// the first line, as nccl-tests has them.
std::string aligned(const std::vector<std::vector<std::string>>& lines);

}  // namespace tessera::benchmark
