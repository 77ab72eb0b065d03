#include "tessera/program/checker.h"

#include "tessera/program/detail/rules.h"

namespace tessera::program {

Proof check(const Program& program, const Units& units, Purpose purpose) {
  detail::MicrobatchRules microbatches(units, purpose);
  detail::ParameterRules parameters(units, purpose);
  detail::GradientRules gradients(units, purpose);
  detail::FileRules files(units, purpose);
  for (size_t i = 0; i < program.size(); ++i) {
    const std::string place = c10::str("at ", i, ": ", describe(program[i]));
    microbatches.see(program[i], place);
    parameters.see(program[i], place);
    gradients.see(program[i], place);
    files.see(program[i], place);
  }
  microbatches.end("at the end");
  parameters.end("at the end");
  gradients.end("at the end");
  files.end("at the end");
  return {.num_microbatches = microbatches.num_microbatches(),
          .peak_alive = microbatches.peak_alive(),
          .gathers = parameters.gathers(),
          .peak_gathered = parameters.peak_gathered()};
}

}  // namespace tessera::program
