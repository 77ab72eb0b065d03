// How fast ranks are, in steps that noise does not reach.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::engine {

// Relative to the fastest, which has 1, in steps of a tenth. Empty where none
// is more than a tenth slower: they count as alike.
std::vector<double> rounded_speeds(const std::vector<double>& rates);

// By rank, rounded: products of matrices in fp32 that every rank multiplies at
// the same time, for tenths of a second, by its share of the cores or of a GPU.
// Comm: a barrier a round, and one all_gather of a double over the world; all
//       ranks return the same.
std::vector<double> measured_speeds(comm::Communicator& ranks,
                                    at::Device device = at::kCPU);

}  // namespace tessera::engine
