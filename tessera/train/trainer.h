// The trainer: a list of named phases, on every rank alike.
//
//   folder, data, model, resume, monitor, loop
//
// Comm:    phases meet at barriers; a step adds metrics.h's (loss, tokens,
//          stop, ...) to what the parallelism needs.
// Spikes:  where spike.action says so all phases begin again, from one of its
//          checkpoints.
// Stop:    a StopRequest on any rank ends the run on all of them after the same
//          step, with a checkpoint and ExitCode::kStopped.
// Bits:    a resumed run computes the bits of the run that was never stopped:
//          its state is the weights, the optimizer's tensors and SavedRun.
// Errors:  as the rooms throw them; what could be found before ranks started
//          was found by preflight().
// Threads: one thread a rank.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/engine/run_config.h"

namespace tessera::train {

struct TrainOptions {
  // preflight() has prepared the run's tokenizer and tokens.
  bool is_prepared = false;
  std::string resume = "auto";  // auto | never | a checkpoint folder
  // Polled between steps; true ends the run with a checkpoint.
  std::function<bool()> stop_requested = [] { return false; };
};

// Runs the training of `config` on this rank.
ExitCode train(const engine::RunConfig& config, comm::Communicator& ranks,
               const TrainOptions& options);

}  // namespace tessera::train
