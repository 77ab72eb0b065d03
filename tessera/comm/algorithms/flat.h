// A group's collectives by an algorithm, over the messages of its backend.
//
// What has no algorithm, or for which none is chosen, is the backend's own; the
// order of the calls is kept.
#pragma once

#include <functional>

#include "tessera/comm/algorithms/collectives.h"
#include "tessera/comm/algorithms/queued_backend.h"

namespace tessera::comm::algorithms {

// What to take for `bytes`, the larger of what a rank gives and gets. The same
// on every rank.
using Chooser = std::function<Algorithm(Verb verb, int64_t bytes)>;

Connection make_flat(Connection inner, Chooser choose);

}  // namespace tessera::comm::algorithms
