#pragma once

#include <CLI/CLI.hpp>

namespace tessera::cli {

// `tessera bench step`, as a part of `bench`.
void add_bench_step(CLI::App& group, int argc, char** argv);

}  // namespace tessera::cli
