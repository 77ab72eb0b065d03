#include <c10/util/Exception.h>

#include <algorithm>

#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {

const std::vector<Pass>& all() {
  static const std::vector<Pass> list = {
      {"devices", devices, /*is_optional=*/false},
      {"units", units, /*is_optional=*/false},
      {"recompute", recompute, /*is_optional=*/false},
      {"sharding", sharding, /*is_optional=*/false},
      {"communication", communication, /*is_optional=*/false},
      {"prefetch", prefetch, /*is_optional=*/true},
      {"reductions", reductions, /*is_optional=*/true},
      {"messages", messages, /*is_optional=*/true},
  };
  return list;
}

Program lower(Program program, const Units& units, Kind kind,
              const std::vector<std::string>& without) {
  for (const Pass& pass : all()) {
    if (std::ranges::count(without, pass.name) > 0) {
      TORCH_INTERNAL_ASSERT(pass.is_optional, "program: the pass ", pass.name,
                            " cannot be left out");
      continue;
    }
    program = pass.run(program, units);
  }
  try {
    check(program, units, kind);
  } catch (c10::Error& error) {
    error.add_context("of the program behind all passes");
    throw;
  }
  return program;
}

}  // namespace tessera::program::passes
