// Whether all ranks see one folder: on several hosts it must lie on a file
// system that they share.
//
// Comm:   a few small collectives over the world.
// Errors: TS_CHECK_CONFIG on every rank alike, with the host that does not see
//         it.
#pragma once

#include <string>

#include "tessera/comm/group.h"

namespace tessera::train {

// By a file that rank 0 writes there for as long. REQUIRES: the folder is there
// on rank 0.
void require_shared(const std::string& folder, comm::Group& world);

}  // namespace tessera::train
