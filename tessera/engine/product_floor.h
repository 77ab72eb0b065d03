// The floor of a step: its matrix products alone, of the same shapes, type and
// threads, each by the fastest call there is (nn/matmul.h's ways, tried in
// turns). No step of this model is faster here that multiplies as it does.
//
// Products of attention are not among them, nor recomputation.
// Memory: one of each shape's operands, for as long as it lives.
// Comm:   none. Threads: those of at::get_num_threads().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/engine/run_config.h"
#include "tessera/nn/matmul.h"
#include "tessera/program/facts.h"
#include "tessera/program/instruction.h"
#include "tessera/program/units.h"

namespace tessera::engine {

struct FloorProduct {
  enum Part { kForward, kInputGradient, kWeightGradient };
  program::MatrixProduct shape;
  Part part = kForward;
  int64_t count = 0;  // in a step
  nn::ProductWay way = nn::ProductWay::kLibTorch;
  double seconds = 0;  // of one, the fastest seen
  double flops() const {
    return 2.0 * static_cast<double>(shape.rows) *
           static_cast<double>(shape.in) * static_cast<double>(shape.out);
  }
};

class ProductFloor {
 public:
  // `products`: of a step, of so many micro-batches. `options`: type and device
  // of the numbers. Chooses each one's way.
  ProductFloor(const std::vector<program::MatrixProduct>& products,
               const at::TensorOptions& options, int64_t batches = 1);

  // All products of the step, once: its seconds.
  double run();
  const std::vector<FloorProduct>& products() const { return products_; }
  double flops() const;  // of a step
  // Of all products, each at the fastest that was seen.
  double flops_per_s() const;

 private:
  struct Operands {
    at::Tensor y, a, b;
  };
  static void choose(FloorProduct& product, const Operands& operands);

  std::vector<FloorProduct> products_;
  std::vector<Operands> operands_;
};

// What the forwards of a rank's program multiply. `facts`: of that rank.
std::vector<program::MatrixProduct> products_of(const program::Program& program,
                                                const program::Units& units,
                                                const program::Facts& facts);

// FLOP/s that the products of a rank's model reach on this process's threads,
// each cut to 768 rows and columns, on a device to 8192: some tenths of a
// second, in which nothing else should compute here. REQUIRES: a completed
// configuration.
double product_rate(const RunConfig& config);

}  // namespace tessera::engine
