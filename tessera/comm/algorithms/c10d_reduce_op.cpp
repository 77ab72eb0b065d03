#include "tessera/comm/algorithms/c10d_reduce_op.h"

#include <array>

#include "tessera/core/error.h"

namespace tessera::comm::algorithms {
namespace {

using Op = c10d::ReduceOp;
// By the value of a ReduceOp of ours.
constexpr std::array kOps = {Op::SUM, Op::AVG, Op::MIN, Op::MAX, Op::PRODUCT};

}  // namespace

ReduceOp reduce_op_of(const c10d::ReduceOp& op) {
  for (size_t i = 0; i < kOps.size(); ++i) {
    if (op.op_ == kOps.at(i)) return static_cast<ReduceOp>(i);
  }
  TS_CHECK(false, "groups reduce with sum, mean, min, max and product only.");
}

c10d::ReduceOp::RedOpType c10d_op_of(ReduceOp op) {
  return kOps.at(static_cast<size_t>(op));
}

}  // namespace tessera::comm::algorithms
