// Operators between ranks, and of rows that travel in parts.
#include <algorithm>
#include <utility>

#include "tessera/models/trace/operators.h"

namespace tessera::models::trace {

Memory Operators::all_reduced(int64_t numel, const Ranks& ranks) const {
  Memory sum = elements(numel);
  tape_.collective("all_reduce", ranks.axes, numel * element_);
  return sum;
}

// Of pieces of so many elements, along a dim that is not the first.
Memory Operators::gathered(int64_t numel, const Ranks& ranks) const {
  const Memory pieces = elements(numel * ranks.size);
  tape_.collective("all_gather", ranks.axes, numel * ranks.size * element_);
  return elements(numel * ranks.size);
}

Memory Operators::scattered(int64_t numel, const Ranks& ranks) const {
  const Memory pieces = elements(numel);
  Memory piece = elements(numel / ranks.size);
  tape_.collective("reduce_scatter", ranks.axes, numel * element_);
  return piece;
}

Traced Operators::identity_with_all_reduce(const Traced& x,
                                           const Ranks& ranks) const {
  return tape_.record(x.memory, x.numel, {x}, {},
                      [this, ranks, numel = x.numel](
                          const Memory& gradient) -> std::vector<Memory> {
                        return {all_reduced(numel, ranks)};
                      });
}

Traced Operators::all_reduce_with_identity(const Traced& x,
                                           const Ranks& ranks) const {
  return tape_.record(
      all_reduced(x.numel, ranks), x.numel, {x}, {},
      [](const Memory& gradient) -> std::vector<Memory> { return {gradient}; });
}

Traced Operators::all_gather_with_reduce_scatter(const Traced& x,
                                                 const Ranks& ranks) const {
  const int64_t whole = x.numel * ranks.size;
  return tape_.record(
      gathered(x.numel, ranks), whole, {x}, {},
      [this, ranks, whole](const Memory& gradient) -> std::vector<Memory> {
        return {scattered(whole, ranks)};
      });
}

Traced Operators::reduce_scatter_with_all_gather(const Traced& x,
                                                 const Ranks& ranks) const {
  const int64_t piece = x.numel / ranks.size;
  return tape_.record(
      scattered(x.numel, ranks), piece, {x}, {},
      [this, ranks, piece](const Memory& gradient) -> std::vector<Memory> {
        return {gathered(piece, ranks)};
      });
}

// Of one sample it lies in one: nothing is copied.
Memory Operators::split(const Memory& whole, const TokenPiece& piece) const {
  if (piece.samples == 1) return whole;
  return elements(piece.samples * piece.here * piece.width);
}

Memory Operators::joined(const TokenPiece& piece, const Ranks& ranks) const {
  const int64_t most = piece.samples * piece.most * piece.width;
  const Memory padded = piece.here < piece.most ? elements(most) : nullptr;
  return gathered(most, ranks);
}

Traced Operators::split_with_all_gather(const Traced& x,
                                        const TokenPiece& piece,
                                        const Ranks& ranks) const {
  return tape_.record(
      split(x.memory, piece), piece.samples * piece.here * piece.width, {x}, {},
      [this, piece, ranks](const Memory& gradient) -> std::vector<Memory> {
        return {joined(piece, ranks)};
      });
}

Traced Operators::all_gather_with_split(const Traced& x,
                                        const TokenPiece& piece,
                                        const Ranks& ranks) const {
  return tape_.record(
      joined(piece, ranks), piece.samples * piece.whole * piece.width, {x}, {},
      [this, piece](const Memory& gradient) -> std::vector<Memory> {
        return {split(gradient, piece)};
      });
}

Traced Operators::all_to_all(const Traced& x, int64_t numel, const Ranks& ranks,
                             bool copied_back) const {
  const int64_t bytes = std::max(numel, x.numel) * element_;
  Memory output = elements(numel);
  tape_.collective("all_to_all", ranks.axes, bytes);
  return tape_.record(
      std::move(output), numel, {x}, {},
      [=, this, from = x.numel](const Memory& gradient) -> std::vector<Memory> {
        Memory home = elements(from);
        const Memory sent = copied_back ? elements(numel) : gradient;
        tape_.collective("all_to_all", ranks.axes, bytes);
        return {std::move(home)};
      });
}

Operators::Travelling Operators::start_all_to_all(const Traced& x,
                                                  int64_t numel,
                                                  const Ranks& ranks) const {
  Memory output = elements(numel);
  tape_.collective("all_to_all", ranks.axes,
                   std::max(numel, x.numel) * element_);
  const auto came_back = std::make_shared<Memory>();
  return {tape_.record(std::move(output), numel, {x}, {},
                       [came_back](const Memory&) -> std::vector<Memory> {
                         return {std::exchange(*came_back, nullptr)};
                       }),
          x.memory, came_back, x.numel};
}

Traced Operators::finish_all_to_all(const Travelling& travelling,
                                    const Ranks& ranks) const {
  const Traced& rows = travelling.rows;
  return tape_.record(
      rows.memory, rows.numel, {rows}, {},
      [=, this, came_back = travelling.came_back, from = travelling.from,
       numel = rows.numel](const Memory& gradient) -> std::vector<Memory> {
        *came_back = elements(from);
        tape_.collective("all_to_all", ranks.axes,
                         std::max(numel, from) * element_);
        return {gradient};
      });
}

std::vector<Traced> Operators::parted(
    const Traced& x, const std::vector<int64_t>& numels) const {
  std::vector<Output> outputs;
  for (const int64_t numel : numels)
    outputs.push_back({elements(numel), numel});
  return tape_.record_all(
      outputs, {x}, {},
      [this, from = x.numel](const std::vector<Memory>&)
          -> std::vector<Memory> { return {elements(from)}; });
}

Traced Operators::put_together(const std::vector<Traced>& parts) const {
  std::vector<int64_t> numels;
  for (const Traced& part : parts) numels.push_back(part.numel);
  const int64_t all = std::reduce(numels.begin(), numels.end());
  return tape_.record(elements(all), all, parts, {},
                      [this, numels](const Memory&) -> std::vector<Memory> {
                        std::vector<Memory> gradients;
                        for (const int64_t numel : numels) {
                          gradients.push_back(elements(numel));
                        }
                        return gradients;
                      });
}

}  // namespace tessera::models::trace
