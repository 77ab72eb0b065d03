#pragma once

namespace tessera::comm {

// What a peer or a library may still read from or write to when its owner must
// go: kept until the process ends, in a list, so that it counts as no leak.
void keep_for_ever(void* abandoned);

}  // namespace tessera::comm
