#include <c10/util/Exception.h>

#include <algorithm>

#include "tessera/program/passes/pass.h"

namespace tessera::program::passes {

const std::vector<Pass>& all() {
  static const std::vector<Pass> list = {
      {"devices", devices, Use::kAlways},
      {"batches", batches, Use::kAlways},
      {"split_backward", split_backward, Use::kIfAskedFor},
      {"units", units, Use::kAlways},
      {"recompute", recompute, Use::kAlways},
      {"sharding", sharding, Use::kAlways},
      {"communication", communication, Use::kAlways},
      {"prefetch", prefetch, Use::kUnlessLeftOut},
      {"reductions", reductions, Use::kUnlessLeftOut},
      {"messages", messages, Use::kUnlessLeftOut},
      {"offload", offload, Use::kAlways},
  };
  return list;
}

bool runs(const Pass& pass, const Choice& choice) {
  const bool left_out = std::ranges::count(choice.without, pass.name) > 0;
  const bool asked_for = std::ranges::count(choice.with, pass.name) > 0;
  TORCH_INTERNAL_ASSERT(!left_out || pass.use != Use::kAlways,
                        "program: the pass ", pass.name, " cannot be left out");
  TORCH_INTERNAL_ASSERT(!asked_for || pass.use == Use::kIfAskedFor,
                        "program: the pass ", pass.name,
                        " need not be asked for");
  return !left_out && (pass.use != Use::kIfAskedFor || asked_for);
}

Program lower(Program program, const Units& units, Purpose purpose,
              const Choice& choice) {
  bool says_all = false;
  Units without_files = units;
  without_files.offloads_states = without_files.offloads_parameters = false;
  for (const Pass& pass : all()) {
    if (!runs(pass, choice)) continue;
    program = pass.run(program, units);
    says_all |= pass.run == sharding;
    if (!says_all) continue;
    try {
      check(program, pass.run == offload ? units : without_files, purpose);
    } catch (c10::Error& error) {
      error.add_context(std::string("behind the pass ") + pass.name);
      throw;
    }
  }
  return program;
}

}  // namespace tessera::program::passes
