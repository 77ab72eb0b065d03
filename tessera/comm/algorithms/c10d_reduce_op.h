// Reductions between c10d's names and ours.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "tessera/comm/group.h"

namespace tessera::comm::algorithms {

// Throws TS_CHECK on one that groups do not have.
ReduceOp reduce_op_of(const c10d::ReduceOp& op);
c10d::ReduceOp::RedOpType c10d_op_of(ReduceOp op);

}  // namespace tessera::comm::algorithms
