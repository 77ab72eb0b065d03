#include "tessera/benchmark/operation.h"

#include <algorithm>
#include <array>
#include <utility>

#include "tessera/comm/verb.h"
#include "tessera/core/error.h"

namespace tessera::benchmark {
namespace {

struct NamedDtype {
  const char* name;
  at::ScalarType dtype;
};

constexpr std::array kDtypes = {
    NamedDtype{"fp32", at::kFloat}, NamedDtype{"fp64", at::kDouble},
    NamedDtype{"fp16", at::kHalf},  NamedDtype{"bf16", at::kBFloat16},
    NamedDtype{"int32", at::kInt},  NamedDtype{"int64", at::kLong},
    NamedDtype{"int8", at::kChar},  NamedDtype{"uint8", at::kByte},
};

constexpr std::array kRedops = {comm::ReduceOp::kSum, comm::ReduceOp::kMean,
                                comm::ReduceOp::kMin, comm::ReduceOp::kMax,
                                comm::ReduceOp::kProduct};

bool has_pieces(Operation operation) {
  return operation == Operation::kAllGather ||
         operation == Operation::kReduceScatter ||
         operation == Operation::kAllToAll;
}

}  // namespace

const std::vector<Operation>& all_operations() {
  static const std::vector<Operation> kAll = {
      Operation::kAllReduce, Operation::kAllGather, Operation::kReduceScatter,
      Operation::kAllToAll,  Operation::kBroadcast, Operation::kSendRecv,
      Operation::kBarrier};
  return kAll;
}

const char* name_of(Operation operation) {
  static constexpr std::array kNames = {
      "all_reduce", "all_gather", "reduce_scatter", "all_to_all",
      "broadcast",  "send_recv",  "barrier"};
  return kNames.at(static_cast<size_t>(operation));
}

std::optional<Operation> operation_of(std::string_view name) {
  for (const Operation operation : all_operations()) {
    if (name == name_of(operation)) return operation;
  }
  return std::nullopt;
}

bool reduces(Operation operation) {
  return operation == Operation::kAllReduce ||
         operation == Operation::kReduceScatter;
}

std::optional<comm::ReduceOp> redop_of(std::string_view name) {
  for (const comm::ReduceOp redop : kRedops) {
    if (name == name_of(redop)) return redop;
  }
  return std::nullopt;
}

const std::vector<std::string_view>& dtype_names() {
  static const std::vector<std::string_view> kNames = [] {
    std::vector<std::string_view> names;
    for (const NamedDtype& known : kDtypes) names.emplace_back(known.name);
    return names;
  }();
  return kNames;
}

const char* name_of(at::ScalarType dtype) {
  for (const NamedDtype& known : kDtypes) {
    if (known.dtype == dtype) return known.name;
  }
  TS_CHECK(false, "bench: dtype ", at::toString(dtype), " has no name here.");
}

std::optional<at::ScalarType> dtype_of(std::string_view name) {
  for (const NamedDtype& known : kDtypes) {
    if (name == known.name) return known.dtype;
  }
  return std::nullopt;
}

double bus_factor(Operation operation, int64_t ranks) {
  const auto n = static_cast<double>(ranks);
  if (operation == Operation::kAllReduce) return 2 * (n - 1) / n;
  return has_pieces(operation) ? (n - 1) / n : 1.0;
}

Counts counts_of(Operation operation, int64_t bytes, int64_t element_bytes,
                 int64_t ranks) {
  if (operation == Operation::kBarrier) return {};
  const int64_t fitting = bytes / element_bytes;
  if (!has_pieces(operation)) {
    const int64_t count = std::max<int64_t>(1, fitting);
    return {.input = count,
            .output = operation == Operation::kSendRecv ? count : 0,
            .piece = count,
            .size = count};
  }
  const int64_t piece = std::max<int64_t>(1, fitting / ranks);
  const int64_t whole = piece * ranks;
  return {.input = operation == Operation::kAllGather ? piece : whole,
          .output = operation == Operation::kReduceScatter ? piece : whole,
          .piece = piece,
          .size = whole};
}

}  // namespace tessera::benchmark
