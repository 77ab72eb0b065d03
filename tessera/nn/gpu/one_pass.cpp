#include "tessera/nn/gpu/one_pass.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "tessera/nn/gpu/program.h"

namespace tessera::nn::gpu {
namespace {

// NormOf of loops/norms.cuh.
struct NormOf {
  const void *weight, *bias;
  double offset;
  int64_t rows, width;
};

// DroppedRows of loops/dropout.cuh.
struct DroppedRows {
  int64_t rows, heads, tokens, width, stride, first_row, first_column;
};

NormOf norm_of(const at::Tensor& x, const at::Tensor& weight, const void* bias,
               double offset) {
  const int64_t width = x.size(-1);
  return {weight.const_data_ptr(), bias, offset, x.numel() / width, width};
}

// Rows that a block has at a time: a warp each, where they are short.
int teams_for(int64_t width) {
  return width <= 1024 ? static_cast<int>(kThreads / kWarp) : 1;
}

int64_t blocks_of(int64_t tasks, int64_t in_block) {
  return (tasks + in_block - 1) / in_block;
}

// How norms are shared out: loops.cu has a kernel for each.
struct NormTeams {
  const char* team;
  int64_t in_block;  // teams
  int near;          // packs of a row that a thread keeps
  std::string loop(const char* name) const {
    return c10::str(name, "_", team, "_", near);
  }
};

int64_t packs_of_row(const at::Tensor& x) {
  return x.size(-1) * static_cast<int64_t>(x.itemsize()) / 16;
}

// So that a row's packs are near. A warp waits for nobody else; of gradients a
// thread keeps sums beside.
NormTeams teams_of_norm(const at::Tensor& x) {
  const int64_t packs = packs_of_row(x);
  if (packs <= 2 * kWarp) return {"warp", kThreads / kWarp, 2};
  if (packs <= 4 * kWarp) return {"warp", kThreads / kWarp, 4};
  if (packs <= kThreads) return {"block", 1, 1};
  return {"block", 1, packs <= 2 * kThreads ? 2 : 4};
}

NormTeams teams_of_gradient(const at::Tensor& x) {
  const int64_t packs = packs_of_row(x);
  if (packs <= 2 * kWarp) return {"warp", kThreads / kWarp, 2};
  if (packs <= kThreads / 2) return {"half", 2, 1};
  if (packs <= kThreads) return {"block", 1, 1};
  return {"block", 1, packs <= 2 * kThreads ? 2 : 4};
}

// Rows whose sums a team keeps: so many that all multiprocessors have some at
// the same time.
int64_t rows_a_part(int64_t rows, const NormTeams& teams) {
  constexpr int64_t kBlocks = 396;
  return std::max<int64_t>(blocks_of(rows, kBlocks * teams.in_block), 4);
}

at::TensorOptions wide_options(const at::Tensor& x) {
  return x.options().dtype(at::toOpMathType(x.scalar_type()));
}

const void* data_or_null(const at::Tensor& x) {
  return x.defined() ? x.const_data_ptr() : nullptr;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    double eps, double offset) {
  RECORD_FUNCTION("tessera::rms_norm_forward", {});
  const NormOf by = norm_of(x, weight, nullptr, offset);
  const NormTeams teams = teams_of_norm(x);
  at::Tensor y = at::empty_like(x);
  at::Tensor scales = at::empty({by.rows}, wide_options(x));
  launch(teams.loop("rms_norm"), x, blocks_of(by.rows, teams.in_block),
         x.const_data_ptr(), by, y.mutable_data_ptr(),
         scales.mutable_data_ptr(), eps);
  return {y, scales};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
    const at::Tensor& inverse_rms, double offset, const at::Tensor& past) {
  RECORD_FUNCTION("tessera::rms_norm_backward", {});
  const NormOf by = norm_of(x, weight, nullptr, offset);
  const NormTeams teams = teams_of_gradient(x);
  const int64_t each = rows_a_part(by.rows, teams);
  const int64_t parts = blocks_of(by.rows, each);
  at::Tensor dx = at::empty_like(x);
  const at::Tensor partial = at::empty({parts, by.width}, wide_options(x));
  launch(teams.loop("rms_norm_backward"), x, blocks_of(parts, teams.in_block),
         gradient.const_data_ptr(), x.const_data_ptr(), by,
         inverse_rms.const_data_ptr(), data_or_null(past),
         dx.mutable_data_ptr(), partial.mutable_data_ptr(), each);
  return {dx, partial.sum(0).to(weight.scalar_type())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
    double eps) {
  RECORD_FUNCTION("tessera::layer_norm_forward", {});
  const NormOf by = norm_of(x, weight, bias.const_data_ptr(), /*offset=*/0);
  const NormTeams teams = teams_of_norm(x);
  auto of_rows = x.sizes().vec();
  of_rows.back() = 1;
  at::Tensor y = at::empty_like(x);
  at::Tensor means = at::empty(of_rows, wide_options(x));
  at::Tensor scales = at::empty_like(means);
  launch(teams.loop("layer_norm"), x, blocks_of(by.rows, teams.in_block),
         x.const_data_ptr(), by, y.mutable_data_ptr(), means.mutable_data_ptr(),
         scales.mutable_data_ptr(), eps);
  return {y, means, scales};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
    const at::Tensor& means, const at::Tensor& scales, const at::Tensor& past) {
  RECORD_FUNCTION("tessera::layer_norm_backward", {});
  const NormOf by = norm_of(x, weight, nullptr, /*offset=*/0);
  const NormTeams teams = teams_of_gradient(x);
  const int64_t each = rows_a_part(by.rows, teams);
  const int64_t parts = blocks_of(by.rows, each);
  at::Tensor dx = at::empty_like(x);
  const at::Tensor partial = at::empty({2, parts, by.width}, wide_options(x));
  launch(teams.loop("layer_norm_backward"), x, blocks_of(parts, teams.in_block),
         gradient.const_data_ptr(), x.const_data_ptr(), by,
         means.const_data_ptr(), scales.const_data_ptr(), data_or_null(past),
         dx.mutable_data_ptr(), partial[0].mutable_data_ptr(),
         partial[1].mutable_data_ptr(), each);
  const at::Tensor sums = partial.sum(1).to(weight.scalar_type());
  return {dx, sums[0], sums[1]};
}

namespace {

// What a loop over columns makes of x: (N, D), of `rows_a_part` rows a row.
at::Tensor parts_of_columns(const char* loop, const at::Tensor& x,
                            int64_t rows_a_part) {
  const int64_t rows = x.size(0), width = x.size(1);
  const int64_t parts = blocks_of(rows, rows_a_part);
  const int64_t pack = 16 / static_cast<int64_t>(x.itemsize());
  const bool in_packs =
      width % pack == 0 &&
      reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  const int64_t lots = blocks_of(in_packs ? width / pack : width, kWarp);
  at::Tensor partial = at::empty({parts, width}, wide_options(x));
  launch(loop, x, parts * lots, x.const_data_ptr(), partial.mutable_data_ptr(),
         rows, rows_a_part, width, static_cast<int>(in_packs));
  return partial;
}

}  // namespace

at::Tensor column_sums(const at::Tensor& x) {
  RECORD_FUNCTION("tessera::column_sums", {});
  return parts_of_columns("column_sums", x, /*rows_a_part=*/256)
      .sum(0)
      .to(x.scalar_type());
}

std::tuple<at::Tensor, at::Tensor> fp8_rows(const at::Tensor& x) {
  RECORD_FUNCTION("tessera::fp8_rows", {});
  const int64_t rows = x.size(0), width = x.size(1);
  const int teams = teams_for(width);
  at::Tensor values =
      at::empty({rows, width}, x.options().dtype(at::kFloat8_e4m3fn));
  at::Tensor scales = at::empty({rows, 1}, wide_options(x));
  launch("fp8_rows", x, blocks_of(rows, teams), x.const_data_ptr(),
         values.mutable_data_ptr(), scales.mutable_data_ptr(), rows, width,
         x.stride(0), teams);
  return {values, scales};
}

std::tuple<at::Tensor, at::Tensor> fp8_columns(const at::Tensor& x) {
  RECORD_FUNCTION("tessera::fp8_columns", {});
  constexpr int64_t kSquare = 64;  // kFp8Square of loops/fp8.cuh
  const int64_t rows = x.size(0), width = x.size(1);
  const at::Tensor most =
      parts_of_columns("largest_of_columns", x, /*rows_a_part=*/64).amax(0);
  at::Tensor values =
      at::empty({width, rows}, x.options().dtype(at::kFloat8_e4m3fn));
  at::Tensor scales = at::empty({width, 1}, wide_options(x));
  launch("fp8_columns", x, blocks_of(rows, kSquare) * blocks_of(width, kSquare),
         x.const_data_ptr(), most.const_data_ptr(), values.mutable_data_ptr(),
         scales.mutable_data_ptr(), rows, width);
  return {values, scales};
}

void take_groups(const at::Tensor& gradient, const at::Tensor& all,
                 const at::Tensor& ends, bool adds) {
  RECORD_FUNCTION("tessera::take_groups", {});
  const int64_t groups = ends.size(0), width = all.numel() / groups;
  const int64_t blocks = blocks_of(blocks_for(all.numel()), groups);
  launch("take_groups", all, groups * blocks, gradient.mutable_data_ptr(),
         all.const_data_ptr(), ends.const_data_ptr(), width, blocks,
         static_cast<int>(adds));
}

at::Tensor add_up_rows(const at::Tensor& rows, const at::Tensor& row,
                       const at::Tensor& weights) {
  RECORD_FUNCTION("tessera::add_up_rows", {});
  const int64_t tokens = row.size(0), width = rows.size(1);
  const int teams = teams_for(width);
  at::Tensor y = at::empty({tokens, width}, rows.options());
  launch("add_up_rows", rows, blocks_of(tokens, teams), rows.const_data_ptr(),
         row.const_data_ptr(), data_or_null(weights), y.mutable_data_ptr(),
         tokens, row.size(1), rows.size(0), width, teams);
  return y;
}

std::tuple<at::Tensor, at::Tensor> add_up_rows_backward(
    const at::Tensor& gradient, const at::Tensor& rows, const at::Tensor& row,
    const at::Tensor& weights) {
  RECORD_FUNCTION("tessera::add_up_rows_backward", {});
  const int64_t tokens = row.size(0), width = rows.size(1);
  const int teams = teams_for(width);
  at::Tensor drows = at::empty_like(rows), dweights = at::empty_like(weights);
  launch("add_up_rows_backward", rows, blocks_of(tokens, teams),
         gradient.const_data_ptr(), rows.const_data_ptr(), row.const_data_ptr(),
         weights.const_data_ptr(), drows.mutable_data_ptr(),
         dweights.mutable_data_ptr(), tokens, row.size(1), rows.size(0), width,
         teams);
  return {drows, dweights};
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos,
                  const at::Tensor& sin, double direction, bool in_place) {
  RECORD_FUNCTION("tessera::rotate", {});
  const int64_t tokens = x.size(1);
  const auto heads = static_cast<int>(x.size(2));
  const auto half = static_cast<int>(x.size(3) / 2);
  at::Tensor y = in_place ? x.variable_data() : at::empty_like(x);
  const int64_t rows = x.size(0) * tokens;
  launch("rotate", x, std::min(rows, blocks_for(x.numel())), x.const_data_ptr(),
         cos.const_data_ptr(), sin.const_data_ptr(), y.mutable_data_ptr(), rows,
         tokens, heads, half, direction);
  return y;
}

at::Tensor glu(bool is_silu, const at::Tensor& gate, const at::Tensor& up) {
  RECORD_FUNCTION(is_silu ? "tessera::swiglu" : "tessera::geglu", {});
  at::Tensor y = at::empty_like(up);
  launch("glu", up, blocks_for(up.numel()), static_cast<int>(is_silu),
         gate.const_data_ptr(), up.const_data_ptr(), y.mutable_data_ptr(),
         up.numel());
  return y;
}

std::tuple<at::Tensor, at::Tensor> glu_backward(bool is_silu,
                                                const at::Tensor& gradient,
                                                const at::Tensor& gate,
                                                const at::Tensor& up) {
  RECORD_FUNCTION(
      is_silu ? "tessera::swiglu_backward" : "tessera::geglu_backward", {});
  // A row of both, side by side.
  auto shape = up.sizes().vec();
  const int64_t width = shape.back();
  shape.back() = 2 * width;
  const at::Tensor both = at::empty(shape, up.options());
  const at::Tensor dgate = both.narrow(-1, 0, width),
                   dup = both.narrow(-1, width, width);
  launch("glu_backward", up, blocks_for(up.numel()), static_cast<int>(is_silu),
         gradient.const_data_ptr(), gate.const_data_ptr(), up.const_data_ptr(),
         dgate.mutable_data_ptr(), dup.mutable_data_ptr(), up.numel(), width);
  return {dgate, dup};
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         int64_t ignored, std::optional<double> scale) {
  RECORD_FUNCTION("tessera::cross_entropy", {});
  const int64_t rows = logits.size(0), width = logits.size(1);
  const at::Tensor losses =
      at::empty({rows}, logits.options().dtype(at::kDouble));
  launch("cross_entropy", logits, rows, logits.mutable_data_ptr(),
         targets.const_data_ptr(), ignored, losses.mutable_data_ptr(), width,
         logits.stride(0), static_cast<int>(scale.has_value()),
         scale.value_or(0.0));
  return losses.sum();
}

void drop(const at::Tensor& past, const at::Tensor& x, const at::Tensor& y,
          const kernels::Mask& mask, int64_t first_row, int64_t first_column) {
  const DroppedRows of = {.rows = x.size(0) * x.size(1) * x.size(2),
                          .heads = x.size(1),
                          .tokens = x.size(2),
                          .width = x.size(3),
                          .stride = x.stride(0),
                          .first_row = first_row,
                          .first_column = first_column};
  constexpr int64_t kColumnsOfOne = 4;  // counter
  launch("drop", x, blocks_for(x.numel() / kColumnsOfOne + of.rows),
         data_or_null(past), x.const_data_ptr(), y.mutable_data_ptr(), mask,
         of);
}

}  // namespace tessera::nn::gpu
