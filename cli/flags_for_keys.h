// What a library says of keys of the configuration, said of a command's flags.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::cli {

// Runs `work`. Where it fails with a tessera::Error that names one of the keys,
// as "data.field" or "--data.field", it names the flag in its place.
void with_flags_for(
    const std::vector<std::pair<std::string, std::string>>& flags_of_keys,
    const std::function<void()>& work);

}  // namespace tessera::cli
