#include "tessera/benchmark/exchange.h"

#include <ATen/ATen.h>

namespace tessera::benchmark {
namespace {

constexpr int64_t kRoot = 0;
// Nothing else is to be done meanwhile.
constexpr comm::Mode kMode = comm::Mode::kBlocking;

}  // namespace

Exchange::Exchange(const Case& what, comm::Group& group, const Pattern& pattern,
                   const Allocate& allocate, int64_t copies)
    : case_(what), group_(group), pattern_(pattern), copies_(copies) {
  if (what.operation == Operation::kBarrier) return;
  const Counts counts = counts_of(
      what.operation, what.bytes,
      static_cast<int64_t>(at::elementSize(what.dtype)), group.size());
  buffers_.resize(copies);
  for (Buffers& buffers : buffers_) {
    buffers.input = allocate(counts.input, what.dtype);
    if (counts.output > 0) {
      buffers.output = allocate(counts.output, what.dtype);
    }
  }
}

void Exchange::rewrite() {
  for (Buffers& buffers : buffers_) {
    write_input(buffers, ++round_);
    if (buffers.output.defined()) buffers.output.zero_();  // never right
  }
}

void Exchange::write_input(Buffers& buffers, int64_t round) {
  const int64_t rank = group_.rank();
  if (reduces(case_.operation)) {
    return pattern_.write(buffers.input, rank, round, case_.redop);
  }
  if (case_.operation == Operation::kBroadcast && rank != kRoot) {
    buffers.input.zero_();
    return;
  }
  pattern_.write(buffers.input, rank, round, std::nullopt);
}

void Exchange::call() {
  if (case_.operation == Operation::kBarrier) {
    for (int64_t i = 0; i < copies_; ++i) group_.barrier();
  }
  for (Buffers& buffers : buffers_) run(buffers);
}

void Exchange::run(Buffers& buffers) {
  const auto& [input, output] = buffers;
  switch (case_.operation) {
    case Operation::kAllReduce:
      return group_.all_reduce(input, case_.redop, kMode).synchronize();
    case Operation::kAllGather:
      return group_.all_gather(output, input, kMode).synchronize();
    case Operation::kReduceScatter:
      return group_.reduce_scatter(output, input, case_.redop, kMode)
          .synchronize();
    case Operation::kAllToAll:
      return group_.all_to_all(output, input, {}, {}, kMode).synchronize();
    case Operation::kBroadcast:
      return group_.broadcast(input, kRoot, kMode).synchronize();
    case Operation::kSendRecv: {
      comm::Work sent = group_.send(input, next());
      group_.recv(output, before()).synchronize();
      return sent.synchronize();
    }
    case Operation::kBarrier:
      return;  // has no buffers
  }
}

int64_t Exchange::count_wrong() const {
  int64_t wrong = 0;
  int64_t round = round_ - static_cast<int64_t>(buffers_.size());
  for (const Buffers& buffers : buffers_) wrong += wrong_in(buffers, ++round);
  return wrong;
}

int64_t Exchange::wrong_in(const Buffers& buffers, int64_t round) const {
  const auto& [input, output] = buffers;
  switch (case_.operation) {
    case Operation::kAllReduce:
      return pattern_.count_not_reduced(input, round, case_.redop);
    case Operation::kReduceScatter:
      return pattern_.count_not_reduced(output, round, case_.redop,
                                        group_.rank() * output.numel());
    case Operation::kBroadcast:
      return pattern_.count_not_of(input, kRoot, round);
    case Operation::kSendRecv:
      return pattern_.count_not_of(output, before(), round);
    default:
      return wrong_in_pieces(output, round);
  }
}

// The piece of each rank: of all_gather the whole of what it holds, of
// all_to_all what it holds for this rank.
int64_t Exchange::wrong_in_pieces(const at::Tensor& output,
                                  int64_t round) const {
  const int64_t numel = output.numel() / group_.size();
  const bool sent_to_each = case_.operation == Operation::kAllToAll;
  const int64_t first = sent_to_each ? group_.rank() * numel : 0;
  int64_t wrong = 0;
  for (int64_t rank = 0; rank < group_.size(); ++rank) {
    wrong += pattern_.count_not_of(output.narrow(0, rank * numel, numel), rank,
                                   round, first);
  }
  return wrong;
}

}  // namespace tessera::benchmark
