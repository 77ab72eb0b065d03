#include "tessera/models/trace/operators.h"

#include <algorithm>
#include <utility>

#include "tessera/nn/kernel_choice.h"
#include "tessera/nn/matmul.h"
#include "tessera/nn/waiting_rows.h"

namespace tessera::models::trace {
namespace {

constexpr int64_t kRowsPerPart = 64;  // of nn's norm, whose parts are summed

Traced made_again(Traced output, int64_t beside) {
  output.again_beside = beside;
  return output;
}

}  // namespace

Ranks along(const mesh::DeviceMesh& mesh, const std::vector<mesh::Axis>& axes) {
  Ranks ranks;
  for (mesh::Axis axis : axes) {
    if (mesh.degree(axis) == 1) continue;
    ranks.axes.push_back(axis);
    ranks.size *= mesh.degree(axis);
  }
  return ranks;
}

// Of one type the product adds into the gradient; of two it goes by a
// temporary, unless the kernel widens as it adds.
void Operators::multiply(int64_t rows, int64_t in, int64_t out,
                         bool adds_gradient) const {
  const bool mixes = adds_gradient && tape_.mixes_types();
  const bool into_wide = mixes && tape_.gradient() == at::kFloat;
  const int64_t widened =
      nn::widened_numbers(tape_.compute(), rows, in, out, into_wide, threads_);
  // cuBLAS sums in fp32 where the gradient lies.
  const bool sums_there = into_wide && tape_.device() == at::kCUDA;
  if (!mixes || sums_there || (widened > 0 && into_wide)) {
    wides(widened);
    return;
  }
  const Memory product = elements(rows * out);
  wides(widened);
  if (!into_wide) wides(rows * out);
}

int64_t Operators::batches_together(int64_t rows, int64_t in,
                                    int64_t out) const {
  const bool may_wait = !tape_.is_frozen() && tape_.device() == at::kCPU &&
                        uses(nn::Kernel::kGradientInPlace);
  return may_wait ? nn::batches_together(rows, in, out, tape_.batches(),
                                         tape_.compute())
                  : 1;
}

void Operators::add_gradient(int64_t rows, int64_t in, int64_t out,
                             int64_t together) const {
  if (together > 1 && tape_.is_first()) {
    tape_.keep(elements(together * rows * (in + out)));
  } else {
    multiply(out, together * rows, in, /*adds_gradient=*/true);
  }
}

std::vector<Traced> Operators::linears(const Traced& x, int64_t rows,
                                       int64_t in,
                                       const std::vector<int64_t>& outs,
                                       bool bias, nn::ProductType type) const {
  const bool has_input_gradient = x.node != nullptr;
  // What is kept of the input is for the weights' gradients alone.
  const bool is_frozen = tape_.is_frozen();
  const bool is_remade = x.node != nullptr && x.again_beside >= 0 &&
                         nn::makes_inputs_again(tape_.device());
  const size_t count = outs.size();
  const auto is_fp8 = [in, type](int64_t out) {
    return type == nn::ProductType::kFp8 && nn::takes_fp8(out, in);
  };
  Memory rounded;
  std::vector<Traced> inputs = {x};
  std::vector<Output> outputs;
  std::vector<int64_t> together;
  for (const int64_t out : outs) {
    together.push_back(batches_together(rows, in, out));
    tape_.forward_flops({.matmul = 2 * rows * in * out});
    tape_.products.push_back(
        {rows, in, out, has_input_gradient, !is_frozen, together.back()});
    inputs.push_back(tape_.parameter(in * out));
    outputs.push_back({elements(rows * out), rows * out});
    if (is_fp8(out)) {
      if (!rounded) rounded = fp8_rows(rows, in);
      multiply_fp8(rows, in, out);
    } else {
      multiply(rows, in, out);
    }
  }
  rounded = nullptr;
  for (const int64_t out : outs) {
    if (bias) inputs.push_back(tape_.parameter(out));
  }
  return tape_.record_all(
      outputs, inputs,
      is_frozen || is_remade ? std::vector<Memory>{} : std::vector{x.memory},
      [=, this, beside = x.again_beside,
       kept = std::weak_ptr(x.memory)](const std::vector<Memory>& arrived) {
        std::vector<Memory> gradients(1 + (bias ? 2 : 1) * count);
        Memory again;
        for (size_t i = 0; i < count; ++i) {
          const program::Flops product{.matmul = 2 * rows * in * outs[i]};
          if (has_input_gradient) {
            tape_.input_flops(product);
            if (i == 0) gradients[0] = elements(rows * in);
            if (is_fp8(outs[i])) {
              const Memory part = i == 0 ? nullptr : elements(rows * in);
              const Memory dy = fp8_rows(rows, outs[i]);
              multiply_fp8(rows, outs[i], in);
            } else {
              multiply(rows, outs[i], in);
            }
          }
          if (is_frozen) continue;
          if (is_remade && !again) {
            again = elements(rows * in);
            bytes(beside);
          }
          tape_.weight_flops(product);
          const auto add = [=, this] {
            add_gradient(rows, in, outs[i], together[i]);
          };
          if (tape_.puts_off()) {
            tape_.put_off({arrived[i], is_remade ? again : kept.lock()}, add);
          } else {
            add();
          }
          if (bias) gradients[1 + count + i] = elements(outs[i]);
        }
        return gradients;
      });
}

// Where loops of a GPU do not write them at once, they are fp32 before.
Memory Operators::fp8_rows(int64_t rows, int64_t width) const {
  const Memory wide =
      tape_.device() == at::kCUDA ? nullptr : wides(rows * width);
  return bytes(rows * width + rows * wide_);
}

// Emulated: both operands and the product in fp32.
void Operators::multiply_fp8(int64_t rows, int64_t in, int64_t out) const {
  const Memory weight = fp8_rows(out, in);
  if (tape_.device() == at::kCUDA) return;
  const Memory wide = wides(rows * in), wide_weight = wides(out * in);
  wides(rows * out);
}

Traced Operators::grouped_linear(const Traced& x, int64_t rows, int64_t in,
                                 int64_t out, int64_t experts) const {
  const program::Flops product{.matmul = 2 * rows * in * out};
  tape_.forward_flops(product);
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t own = (rows + e) / experts;  // which sum up to `rows`
    tape_.products.push_back({.rows = own,
                              .in = in,
                              .out = out,
                              .weight_gradient = !tape_.is_frozen()});
  }
  const int64_t weights = experts * in * out;
  const int64_t own = (rows + experts - 1) / experts;
  const Memory y = elements(rows * out);
  multiply(own, in, out);
  return tape_.record(y, rows * out, {x, tape_.parameter(weights)}, {x.memory},
                      [=, this, kept = std::weak_ptr(x.memory)](
                          const Memory& gradient) -> std::vector<Memory> {
                        tape_.input_flops(product);
                        Memory dx = elements(rows * in);
                        multiply(own, out, in);
                        if (tape_.is_frozen()) return {std::move(dx), nullptr};
                        tape_.weight_flops(product);
                        const bool at_once = tape_.device() == at::kCUDA &&
                                             tape_.compute() == at::kBFloat16;
                        const auto add = [=, this] {
                          if (at_once) {
                            elements(weights);
                          } else {
                            multiply(out, own, in, /*adds_gradient=*/true);
                          }
                        };
                        if (tape_.puts_off()) {
                          tape_.put_off({gradient, kept.lock()}, add);
                        } else {
                          add();
                        }
                        return {std::move(dx), nullptr};
                      });
}

Traced Operators::add_bias(const Traced& x, int64_t width) const {
  return tape_.record(
      elements(x.numel), x.numel, {x, tape_.parameter(width)}, {},
      [this, width](const Memory& gradient) -> std::vector<Memory> {
        return {gradient, elements(width)};
      });
}

Traced Operators::add_scaled(const Traced& x, const Traced& y) const {
  return tape_.record(
      elements(x.numel), x.numel, {x, y}, {},
      [this, numel = y.numel](const Memory& gradient) -> std::vector<Memory> {
        return {gradient, elements(numel)};
      });
}

Traced Operators::add(const Traced& x, const Traced& y) const {
  return tape_.record(elements(x.numel), x.numel, {x, y}, {},
                      [](const Memory& gradient) -> std::vector<Memory> {
                        return {gradient, gradient};
                      });
}

Traced Operators::add_to(const Traced& x, const Traced& y) const {
  return tape_.record(y.memory, x.numel, {x, y}, {},
                      [](const Memory& gradient) -> std::vector<Memory> {
                        return {gradient, gradient};
                      });
}

Traced Operators::scaled(const Traced& x, bool in_place) const {
  return tape_.record(
      in_place ? x.memory : elements(x.numel), x.numel, {x}, {},
      [this, numel = x.numel](const Memory& gradient) -> std::vector<Memory> {
        return {elements(numel)};
      });
}

Traced Operators::rms_norm(const Traced& x, int64_t width) const {
  return rms_norm_branch(x, width).second;
}

std::vector<Memory> Operators::norm_gradients(int64_t rows,
                                              int64_t width) const {
  Memory dx = elements(rows * width);
  const int64_t parts = (rows + kRowsPerPart - 1) / kRowsPerPart;
  const Memory partial = wides(parts * width);
  const Memory sum = wides(width);
  return {std::move(dx), elements(width)};
}

std::pair<Traced, Traced> Operators::rms_norm_branch(const Traced& x,
                                                     int64_t width) const {
  const int64_t rows = x.numel / width;
  const Memory y = elements(x.numel), inverse_rms = wides(rows);
  const auto both = tape_.record_all(
      {{x.memory, x.numel}, {y, x.numel}}, {x, tape_.parameter(width)},
      {x.memory, inverse_rms}, [this, rows, width](const std::vector<Memory>&) {
        return norm_gradients(rows, width);
      });
  return {both[0], made_again(both[1], inverse_rms->bytes())};
}

Traced Operators::layer_norm(const Traced& x, int64_t width) const {
  const int64_t rows = x.numel / width;
  const Memory y = elements(x.numel), mean = wides(rows), rstd = wides(rows);
  const Traced weight = tape_.parameter(width), bias = tape_.parameter(width);
  const Traced normed = tape_.record(
      y, x.numel, {x, weight, bias}, {x.memory, mean, rstd},
      [this, numel = x.numel,
       width](const Memory& gradient) -> std::vector<Memory> {
        Memory dx = elements(numel), dweight = elements(width);
        Memory dbias = elements(width);
        const Memory partial = wides(2 * threads_ * width);
        return {std::move(dx), std::move(dweight), std::move(dbias)};
      });
  return made_again(normed, mean->bytes() + rstd->bytes());
}

Traced Operators::gelu(const Traced& x) const {
  const Traced y = tape_.record(
      elements(x.numel), x.numel, {x}, {x.memory},
      [this, numel = x.numel](const Memory& gradient) -> std::vector<Memory> {
        return {elements(numel)};
      });
  return made_again(y, 0);
}

Traced Operators::glu(const Traced& gate, const Traced& up) const {
  const Traced y = tape_.record(
      elements(up.numel), up.numel, {gate, up}, {gate.memory, up.memory},
      [this, numel = up.numel](const Memory& gradient) -> std::vector<Memory> {
        return {elements(numel), elements(numel)};
      });
  return made_again(y, 0);
}

Traced Operators::rotate(const Traced& x, const Memory& kept,
                         bool in_place) const {
  return tape_.record(
      in_place ? x.memory : elements(x.numel), x.numel, {x}, {kept},
      [this, numel = x.numel](const Memory& gradient) -> std::vector<Memory> {
        return {gradient.use_count() == 1 ? gradient : elements(numel)};
      });
}

Traced Operators::reorder(const Traced& x, bool copied_back) const {
  return tape_.record(elements(x.numel), x.numel, {x}, {},
                      [this, copied_back, numel = x.numel](
                          const Memory& gradient) -> std::vector<Memory> {
                        return {copied_back ? elements(numel) : gradient};
                      });
}

Traced Operators::index_select(const Traced& x, int64_t numel,
                               const Memory& index) const {
  return tape_.record(
      elements(numel), numel, {x}, {index},
      [this, from = x.numel](const Memory& gradient) -> std::vector<Memory> {
        return {elements(from)};
      });
}

Traced Operators::embedding(const Memory& index, int64_t numel,
                            int64_t table_numel) const {
  return tape_.record(elements(numel), numel, {tape_.parameter(table_numel)},
                      {index},
                      [=, this](const Memory& gradient) -> std::vector<Memory> {
                        // A device has it by itself before it is added.
                        if (tape_.device() != at::kCPU) {
                          elements(table_numel);
                        } else if (tape_.puts_off()) {
                          tape_.put_off({gradient}, [] {});
                        }
                        return {nullptr};
                      });
}

Traced Operators::masked_fill(const Traced& x, const Memory& mask) const {
  return tape_.record(
      elements(x.numel), x.numel, {x}, {mask},
      [this, numel = x.numel](const Memory& gradient) -> std::vector<Memory> {
        return {elements(numel)};
      });
}

}  // namespace tessera::models::trace
