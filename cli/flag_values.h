// Checks of numbers that flags are given, on the words as they were typed: what
// would wrap, saturate or lose its fraction is refused.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>

namespace tessera::cli {

inline constexpr int64_t kAnyWhole = INT64_MAX;

// A whole number from `least` to `most`.
CLI::Validator whole_number(int64_t least, int64_t most = kAnyWhole);

// A path, which is never empty: "$FOLDER" of what was not set.
CLI::Validator some_path();

// A number from `least` to `most`; `above`: more than `least`.
CLI::Validator number_between(double least, double most, bool above = false);

}  // namespace tessera::cli
