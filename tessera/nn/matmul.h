// Products of matrices: the one place where layers compute them.
//
// Kernel: fp32 on a CPU goes through oneDNN, which LibTorch itself takes for
//         narrower types alone; on Intel's processors MKL, behind at::mm, is
//         faster (bench/results/step_*.md), and without AVX-512 it is the one
//         there is. fp16, for which few processors
//         have arithmetic, and bf16 on one that multiplies it no faster
//         (gains_by_bf16) go through fp32: operands are widened as they are
//         packed (detail/wide_product), sums are fp32, rounded once. All else,
//         and what is too small to matter: at::mm.
//         Which one depends on shapes, types and the processor, never on a
//         timing: the bits are the same in every run.
// Memory: the gradient of a weight whose .grad is there is added to it by the
//         product itself, or written if it is the step's first
//         (unwritten_gradients.h): no temporary of the weight's size, no second
//         pass.
//         Not where somebody listens to that gradient (a hook, as of
//         DistributedDataParallel), asks for it by autograd::grad or records
//         the backward itself. On a CPU an input that a norm or an activation
//         of nn made is not kept for the backward but made again there, with
//         the same bits (detail/remade.h).
// fp8:    y and dx by choice, of weights that take it (fp8_product.h): what is
//         kept and the gradients of weights stay as they are; a backward that
//         is itself recorded takes the weights as they are.
// Later:  inside of a WeightQueue (weight_queue.h) gradients of weights are
//         left to it.
// Heard:  who listens to parameters' memory (wrappers' fully_shard) is told
//         before a product reads or writes it.
// Names:  N rows, `in` and `out` features; weights are (out, in).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "tessera/nn/fp8_product.h"

namespace tessera::nn {

enum class ProductWay { kLibTorch, kOneDnn, kWidened };
inline constexpr std::array kProductWayNames = {"at::mm", "oneDNN", "widened"};

// Whether oneDNN's products of fp32 can be called on this processor: LibTorch
// asks of them what it asks of those of bf16, AVX-512 or its like.
bool has_one_dnn_products();

// What product_into() takes for such operands; and for those of a CPU, of a
// type and so many multiplications.
ProductWay product_way(const at::Tensor& y, const at::Tensor& a);
ProductWay product_way(int64_t multiplications, at::ScalarType type);

// Those of other steps, or others in every step, as of experts: then not by
// oneDNN, which makes code for every size that it has not met.
enum class Sizes { kSame, kNew };

// y = a b, or y += a b. a: (N, K), b: (K, M), each a matrix or its transpose;
// y: (N, M), contiguous; of the operands' type, or fp32 where they are widened.
void product_into(const at::Tensor& y, const at::Tensor& a, const at::Tensor& b,
                  bool adds = false, Sizes sizes = Sizes::kSame);
void product_into(const at::Tensor& y, const at::Tensor& a, const at::Tensor& b,
                  bool adds, ProductWay way);

// Whether products of this type are widened here, but for small ones.
bool widens(at::ScalarType type);
// Numbers of fp32 that product_into() then holds meanwhile, for a: (rows, in)
// and b: (in, out) of this type, with y of it too or, `into_wide`, of fp32.
int64_t widened_numbers(at::ScalarType type, int64_t rows, int64_t in,
                        int64_t out, bool into_wide, int64_t threads);

// y = x W^T + b, for autograd. x: (..., in), weight: (out, in), bias: (out) or
// undefined -> (..., out).
at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight,
                          const at::Tensor& bias = {},
                          ProductType type = ProductType::kSame);

// Whether it gains over LibTorch's own where x and weight are of this type on a
// CPU: by the product, or by the weight's gradient (see Memory).
bool gains_by_linear_product(int64_t multiplications, at::ScalarType type);

// Several of one x, whose gradient is then one sum. A bias for each weight, or
// none at all.
std::vector<at::Tensor> linear_products(const at::Tensor& x,
                                        const std::vector<at::Tensor>& weights,
                                        const std::vector<at::Tensor>& biases,
                                        ProductType type = ProductType::kSame);

// For backwards of one's own: whether the one that is under way may add to
// weight.grad by itself (see Memory); and gradient += dy^T x, or = where it
// does not add, of types as weights and their gradients have them. gradient:
// (out, in), contiguous.
bool adds_in_place(const at::Tensor& weight);
void gradient_into(const at::Tensor& gradient, const at::Tensor& dy,
                   const at::Tensor& x, bool adds, Sizes sizes = Sizes::kSame);

// weight.grad += dy^T x, outside of any backward; made where there is none.
// dy: (N, out), x: (N, in).
void add_weight_gradient(const at::Tensor& weight, const at::Tensor& dy,
                         const at::Tensor& x);

// Rows of a table, for autograd. ids: int64 of any shape, table: (rows, D) ->
// (ids..., D).
at::Tensor table_rows(const at::Tensor& table, const at::Tensor& ids);

}  // namespace tessera::nn
