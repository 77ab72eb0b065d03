// Values of configuration keys that are given as flags.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "tessera/core/config.h"
#include "tessera/engine/run_config.h"

namespace tessera::cli {

// The command takes flags --section.key=value: of these keys, or where none is
// named of all that the configuration has.
void take_keys(CLI::App& command, std::vector<std::string> keys = {});
// Whether that was said of it.
bool takes_key(const CLI::App& command, const std::string& key);

// The command takes --set key=value, one value each, before its file too.
void add_sets(CLI::App& command, std::vector<std::string>& sets);

// What `--set a.b=v` gave, then "--a.b=v" and "--a.b v" among the words that no
// option took, as they come. TS_CHECK_USAGE on any other word.
std::vector<config::Override> overrides_of(
    const std::vector<std::string>& sets,
    const std::vector<std::string>& extras);

// For a command that reads no data, whatever the run has.
void take_random_tokens(engine::RunConfig& config);

}  // namespace tessera::cli
