// Facts of a decoder: what its units cost on a rank, as a pure function of
// numbers. See program/facts.h.
//
// Activations, floating-point operations and collectives are found by going
// through a unit as forward and backward do, with sizes in place of tensors
// (tape.h).
// Routing: of experts even: as many rows for each, from every rank.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

#include "tessera/models/trace/traced_model.h"
#include "tessera/program/facts.h"

namespace tessera::models::trace {

struct FactsOptions {
  at::ScalarType compute = at::kFloat;
  at::ScalarType gradient = at::kFloat;
  int64_t threads = 1;  // of an operator
  int64_t batches = 1;  // that go through each unit in a step
  c10::DeviceType device = c10::kCPU;
};

// Of all units, without their parameters: those that strategies place are told
// by parallel/facts.h.
program::Facts facts_of(const TracedModel& model, const FactsOptions& options);

}  // namespace tessera::models::trace
