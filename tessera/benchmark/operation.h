// What `tessera bench comm` measures, and the arithmetic of its columns.
//
// Sizes and bandwidths are those of nccl-tests (doc/PERFORMANCE.md): algbw is
// S/t, and busbw multiplies it by a factor of the operation and the ranks, so
// that it may be held against what the hardware moves, whatever the ranks.
// S: of all_gather, reduce_scatter and all_to_all the larger side of a rank,
//    n pieces; else what a rank hands in. Count: elements of S, or of a piece.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::benchmark {

enum class Operation : uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kSendRecv,  // to the next rank and from the one before, at once
  kBarrier,
};

const std::vector<Operation>& all_operations();
const char* name_of(Operation operation);  // "all_reduce", "send_recv" ...
std::optional<Operation> operation_of(std::string_view name);
bool reduces(Operation operation);

std::optional<comm::ReduceOp> redop_of(std::string_view name);  // of "sum" ...

// "fp32", "bf16", "int64" ...
const std::vector<std::string_view>& dtype_names();
const char* name_of(at::ScalarType dtype);
std::optional<at::ScalarType> dtype_of(std::string_view name);

double bus_factor(Operation operation, int64_t ranks);

// Elements of one rank.
struct Counts {
  int64_t input = 0;
  int64_t output = 0;  // 0: in place
  int64_t piece = 0;   // the column "count"
  int64_t size = 0;    // S, in elements
};

// As many as fit into `bytes`, and at least one a piece: where `bytes` does not
// divide, S is smaller than asked.
Counts counts_of(Operation operation, int64_t bytes, int64_t element_bytes,
                 int64_t ranks);

}  // namespace tessera::benchmark
