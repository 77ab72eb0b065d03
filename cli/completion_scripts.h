// The scripts by which shells complete the program's command lines.
#pragma once

#include <string>
#include <vector>

#include "cli/completion_words.h"

namespace tessera::cli {

std::string bash_completion(const std::vector<OfferedCommand>& commands);
// Read by zsh's own completion, from a file of fpath or by source.
std::string zsh_completion(const std::vector<OfferedCommand>& commands);
std::string fish_completion(const std::vector<OfferedCommand>& commands);

}  // namespace tessera::cli
