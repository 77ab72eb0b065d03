#include "tessera/train/compute_again.h"

#include <algorithm>
#include <utility>

#include "tessera/nn/parameter.h"

namespace tessera::train {

using program::Instruction;
using program::Op;

namespace {

bool is_backward(Op op) {
  return op == Op::kBackward || op == Op::kBackwardInput ||
         op == Op::kBackwardWeight;
}

}  // namespace

void compute_again(engine::RankModel& model, engine::StepInput input,
                   const HearsGradient& hears) {
  const auto parameters = nn::parameters_of(model.decoder());
  input.again = true;
  model.step(std::move(input), [&](const Instruction& done, double, double) {
    if (!is_backward(done.op)) return;
    model.composed().parameters->complete_gradients(done.version);
    for (const auto& [name, spec, tensor] : parameters) {
      const bool is_its = std::ranges::count(spec->units, done.unit) > 0;
      if (!is_its || !tensor.grad().defined()) continue;
      hears(name, done.microbatch, tensor.grad());
    }
  });
}

}  // namespace tessera::train
