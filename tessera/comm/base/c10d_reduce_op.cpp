#include "tessera/comm/base/c10d_reduce_op.h"

#include <array>

#include "tessera/comm/base/reduce.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using Op = c10d::ReduceOp;
// By the value of a ReduceOp of ours.
constexpr std::array kOps = {Op::SUM, Op::AVG, Op::MIN, Op::MAX, Op::PRODUCT};

}  // namespace

ReduceOp reduce_op_of(const c10d::ReduceOp& op, at::ScalarType dtype,
                      const std::string& backend) {
  for (size_t i = 0; i < kOps.size(); ++i) {
    if (op.op_ != kOps.at(i)) continue;
    const auto ours = static_cast<ReduceOp>(i);
    check_reducible(dtype, ours);
    return ours;
  }
  TS_CHECK(false, backend,
           " reduces with sum, mean, min, max and product only.");
}

c10d::ReduceOp::RedOpType c10d_op_of(ReduceOp op) {
  return kOps.at(static_cast<size_t>(op));
}

}  // namespace tessera::comm
