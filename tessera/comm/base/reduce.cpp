#include "tessera/comm/base/reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include "tessera/comm/base/kernels/kernels.h"
#include "tessera/comm/verb.h"
#include "tessera/core/error.h"
#include "tessera/core/vectors.h"

namespace tessera::comm {
namespace {

using kernels::Kind;

std::optional<Kind> kind_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return Kind::kF64;
    case at::kFloat:
      return Kind::kF32;
    case at::kHalf:
      return Kind::kF16;
    case at::kBFloat16:
      return Kind::kBF16;
    case at::kLong:
      return Kind::kI64;
    case at::kInt:
      return Kind::kI32;
    case at::kShort:
      return Kind::kI16;
    case at::kChar:
      return Kind::kI8;
    case at::kByte:
    case at::kBool:
      return Kind::kU8;
    default:
      return std::nullopt;
  }
}

kernels::Op op_of(ReduceOp op) {
  using kernels::Op;
  static constexpr std::array kOps = {Op::kSum, Op::kMean, Op::kMin, Op::kMax,
                                      Op::kProduct};
  return kOps.at(static_cast<size_t>(op));
}

const kernels::Kernels& machine_kernels() {
  static const auto& chosen = *that_run_here(kernels::kByVectors).back();
  return chosen;
}

// Asked for more at once, the C library goes past the caches, which is some 8%
// slower where the other core copies too.
constexpr int64_t kCopyBytes = 128 << 10;

// Streaming stores want whole lines at the same addresses in every output.
bool can_stream(std::span<void* const> outputs) {
  for (const void* output : outputs) {
    if (reinterpret_cast<uintptr_t>(output) % 64 != 0) return false;
  }
  return true;
}

}  // namespace

void check_reducible(at::ScalarType dtype, ReduceOp op) {
  TS_CHECK(kind_of(dtype).has_value(), "cannot reduce ", dtype,
           " tensors. Reduce float, double, half, bfloat16, bool or integers.");
  TS_CHECK(op != ReduceOp::kMean || at::isFloatingType(dtype), "the mean of ",
           dtype, " tensors is not defined. Use the sum.");
  TS_CHECK(dtype != at::kBool || op == ReduceOp::kMin || op == ReduceOp::kMax,
           "the ", name_of(op),
           " of bool tensors is not defined. Use min (and) or max (or).");
}

void reduce(std::span<const void* const> inputs, std::span<void* const> outputs,
            int64_t numel, at::ScalarType dtype, ReduceOp op, Stores stores) {
  const kernels::Job job{
      .inputs = reinterpret_cast<const char* const*>(inputs.data()),
      .num_inputs = static_cast<int64_t>(inputs.size()),
      .outputs = reinterpret_cast<char* const*>(outputs.data()),
      .num_outputs = static_cast<int64_t>(outputs.size()),
      .numel = numel,
      .streaming = stores == Stores::kStreaming && can_stream(outputs),
      .asks_ahead = stores == Stores::kAskedAhead};
  machine_kernels().reduce(job, *kind_of(dtype), op_of(op));
}

void reduce(std::span<const void* const> inputs, void* output, int64_t numel,
            at::ScalarType dtype, ReduceOp op) {
  reduce(inputs, std::span<void* const>(&output, 1), numel, dtype, op);
}

void copy_bytes(void* to, const void* from, int64_t bytes, Stores stores) {
  if (bytes <= 0) return;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  if (stores == Stores::kStreaming) {
    return machine_kernels().copy_streaming(out, in, bytes);
  }
  if (stores == Stores::kAskedAhead) {
    return machine_kernels().copy_ahead(out, in, bytes);
  }
  for (int64_t done = 0; done < bytes; done += kCopyBytes) {
    std::memcpy(out + done, in + done,
                static_cast<size_t>(std::min(kCopyBytes, bytes - done)));
  }
}

}  // namespace tessera::comm
