// The program's page for man(1), in roff.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "tessera/core/config.h"

namespace tessera::cli {

// Commands and flags as `program` declares them, keys as the configuration
// does.
std::string man_page(const CLI::App& program,
                     const std::vector<config::Entry>& keys);

}  // namespace tessera::cli
