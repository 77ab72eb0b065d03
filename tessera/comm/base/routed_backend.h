// One c10d::Backend of two: tensors of one kind of device go over the one that
// carries them, all others over that of the CPU.
//
// Order:  the operations of each are in the order of their calls; those of the
//         two go on beside each other.
// Sync:   barrier() is the CPU's: it says nothing of what devices have done.
// Errors: an operation between a tensor of that device and another is refused.
#pragma once

#include "tessera/comm/base/backend_group.h"

namespace tessera::comm {

// `device`: of what carries tensors of `type`. Both of the same ranks.
Connection make_routed(Connection cpu, const Connection& device,
                       c10::DeviceType type);

}  // namespace tessera::comm
