// Values of configuration keys that are given as flags.
#pragma once

#include <string>
#include <vector>

#include "tessera/core/config.h"

namespace tessera::cli {

// What `--set a.b=v` gave, then "--a.b=v" and "--a.b v" among the words that no
// option took, as they come. TS_CHECK_USAGE on any other word.
std::vector<config::Override> overrides_of(
    const std::vector<std::string>& sets,
    const std::vector<std::string>& extras);

}  // namespace tessera::cli
