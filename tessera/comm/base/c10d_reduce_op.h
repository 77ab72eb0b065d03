// Reductions between c10d's names and ours.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>

#include "tessera/comm/group.h"

namespace tessera::comm {

// Throws TS_CHECK, in the name of `backend`, on one that groups do not have or
// that is not defined for `dtype`.
ReduceOp reduce_op_of(const c10d::ReduceOp& op, at::ScalarType dtype,
                      const std::string& backend);
c10d::ReduceOp::RedOpType c10d_op_of(ReduceOp op);

}  // namespace tessera::comm
