#include "tessera/engine/product_floor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>

#include "tessera/core/device.h"
#include "tessera/engine/memory_plan.h"

namespace tessera::engine {
namespace {

using program::MatrixProduct;
using Part = FloorProduct::Part;

// Of so many of them, one behind the other.
double seconds_of(const FloorProduct& product, const at::Tensor& y,
                  const at::Tensor& a, const at::Tensor& b, int64_t times = 1) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < times; ++i) {
    nn::product_into(y, a, b, /*adds=*/false, product.way);
  }
  wait_for_device(y.device());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

// Others than LibTorch's are of the CPU.
bool takes(nn::ProductWay way, const at::Tensor& a) {
  if (way == nn::ProductWay::kLibTorch) return true;
  if (!a.is_cpu()) return false;
  return way == nn::ProductWay::kOneDnn
             ? a.scalar_type() == at::kFloat && nn::has_one_dnn_products()
             : c10::isReducedFloatingType(a.scalar_type());
}

}  // namespace

ProductFloor::ProductFloor(const std::vector<MatrixProduct>& products,
                           const at::TensorOptions& options, int64_t batches) {
  const at::NoGradGuard no_grad;
  std::map<std::pair<MatrixProduct, Part>, int64_t> counts;
  std::map<MatrixProduct, int64_t> waiting;
  for (const MatrixProduct& each : products) {
    if (each.rows * each.in * each.out == 0) continue;
    const MatrixProduct shape{each.rows, each.in, each.out};
    ++counts[{shape, Part::kForward}];
    if (each.input_gradient) ++counts[{shape, Part::kInputGradient}];
    if (each.weight_gradient && each.together == 1) {
      ++counts[{shape, Part::kWeightGradient}];
    } else if (each.weight_gradient) {
      ++waiting[each];
    }
  }
  // Each weight's by themselves, so many at once as a step has.
  const auto add = [&](const MatrixProduct& of, int64_t together,
                       int64_t times) {
    if (together * times == 0) return;
    const MatrixProduct shape{of.rows * together, of.in, of.out};
    counts[{shape, Part::kWeightGradient}] += times;
  };
  for (const auto& [each, count] : waiting) {
    const int64_t weights = count / batches, rest = count % batches;
    add(each, each.together,
        weights * (batches / each.together) + rest / each.together);
    add(each, batches % each.together, weights);
    add(each, rest % each.together, 1);
  }
  for (const auto& [key, count] : counts) {
    const auto& [shape, part] = key;
    const auto matrix = [options](int64_t rows, int64_t columns) {
      // GPUs multiply numbers that are all alike faster than others.
      return options.device().is_cpu() ? at::full({rows, columns}, 0.5, options)
                                       : at::randn({rows, columns}, options);
    };
    const at::Tensor x = matrix(shape.rows, shape.in);
    const at::Tensor weight = matrix(shape.out, shape.in);
    const at::Tensor y = matrix(shape.rows, shape.out);
    FloorProduct product{.shape = shape, .part = part, .count = count};
    operands_.push_back(part == Part::kForward ? Operands{y, x, weight.t()}
                        : part == Part::kInputGradient
                            ? Operands{x, y, weight}
                            : Operands{weight, y.t(), x});
    choose(product, operands_.back());
    products_.push_back(product);
  }
}

// Those that are slower than another at their best are not tried again.
void ProductFloor::choose(FloorProduct& product, const Operands& operands) {
  constexpr int kRounds = 3;
  const int64_t at_once = operands.y.is_cpu() ? 1 : 4;  // as run() times them
  const auto time = [&] {
    return seconds_of(product, operands.y, operands.a, operands.b, at_once) /
           static_cast<double>(at_once);
  };
  double best = std::numeric_limits<double>::infinity();
  FloorProduct fastest = product;
  for (const auto way : {nn::ProductWay::kLibTorch, nn::ProductWay::kOneDnn,
                         nn::ProductWay::kWidened}) {
    if (!takes(way, operands.a)) continue;
    product.way = way;
    // What is made at the first call is no part of the product.
    time();
    double least = time();
    for (int i = 1; i < kRounds && least < 4 * best; ++i) {
      least = std::min(least, time());
    }
    if (least >= best) continue;
    best = product.seconds = least;
    fastest = product;
  }
  product = fastest;
}

double ProductFloor::run() {
  const at::NoGradGuard no_grad;
  double sum = 0;
  for (size_t i = 0; i < products_.size(); ++i) {
    const auto& [y, a, b] = operands_[i];
    // To wait for a device takes as long as a small product.
    const int64_t count = products_[i].count, at_once = y.is_cpu() ? 1 : count;
    for (int64_t n = 0; n < count; n += at_once) {
      const double took = seconds_of(products_[i], y, a, b, at_once);
      products_[i].seconds =
          std::min(products_[i].seconds, took / static_cast<double>(at_once));
      sum += took;
    }
  }
  return sum;
}

double ProductFloor::flops() const {
  double sum = 0;
  for (const auto& each : products_) {
    sum += static_cast<double>(each.count) * each.flops();
  }
  return sum;
}

double ProductFloor::flops_per_s() const {
  double seconds = 0;
  for (const auto& each : products_) {
    seconds += static_cast<double>(each.count) * each.seconds;
  }
  return flops() / seconds;
}

std::vector<MatrixProduct> products_of(const program::Program& program,
                                       const program::Units& units,
                                       const program::Facts& facts) {
  std::vector<MatrixProduct> all;
  const auto add = [&](const program::UnitFacts& of) {
    all.insert(all.end(), of.products.begin(), of.products.end());
  };
  for (const auto& instruction : program) {
    if (instruction.op == program::Op::kLoss) add(facts.loss);
    if (instruction.op != program::Op::kForward) continue;
    if (instruction.unit >= 0) {
      add(facts.units.at(instruction.unit));
    } else {
      for (int64_t unit : units.chunks.at(instruction.chunk)) {
        add(facts.units.at(unit));
      }
    }
  }
  return all;
}

double product_rate(const RunConfig& of) {
  // A device is not filled by what takes a core long enough.
  const c10::DeviceType device = of.run.device_of_stage(0);
  const int64_t most = device == at::kCPU ? 768 : 8192;
  RunConfig config = of;
  config.mesh.data_parallel = "ddp";  // what a device around another does too
  const auto mesh = mesh_of(config, implied_world_size(config));
  auto facts = facts_of(config, mesh, mesh.coord_of(0));
  facts.units.push_back(facts.loss);
  std::vector<MatrixProduct> products;
  int64_t batches = 1;  // as many as are multiplied together
  for (const auto& unit : facts.units) {
    for (MatrixProduct each : unit.products) {
      for (int64_t* size : {&each.rows, &each.in, &each.out}) {
        *size = std::min(*size, most);
      }
      products.push_back(each);
      batches = std::max(batches, each.together);
    }
  }
  const std::vector<MatrixProduct> of_one = products;
  for (int64_t i = 1; i < batches; ++i) {
    products.insert(products.end(), of_one.begin(), of_one.end());
  }
  return ProductFloor(
             products,
             at::TensorOptions(config.precision.compute_dtype()).device(device),
             batches)
      .flops_per_s();
}

}  // namespace tessera::engine
