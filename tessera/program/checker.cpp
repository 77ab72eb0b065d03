#include "tessera/program/checker.h"

#include "tessera/program/detail/rules.h"

namespace tessera::program {

Proof check(const Program& program, const Units& units, Purpose purpose) {
  detail::MicrobatchRules microbatches(units, purpose);
  detail::ParameterRules parameters(units, purpose);
  detail::GradientRules gradients(units, purpose);
  detail::FileRules files(units, purpose);
  for (size_t i = 0; i < program.size(); ++i) {
    microbatches.see(program[i], i);
    parameters.see(program[i], i);
    gradients.see(program[i], i);
    files.see(program[i], i);
  }
  microbatches.end();
  parameters.end();
  gradients.end();
  files.end();
  return {.num_microbatches = microbatches.num_microbatches(),
          .peak_alive = microbatches.peak_alive(),
          .gathers = parameters.gathers(),
          .peak_gathered = parameters.peak_gathered()};
}

}  // namespace tessera::program
