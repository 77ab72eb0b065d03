// Products of matrices as an MLP's layer has them, and an embedding's backward.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/benchmark/kernels/contest.h"
#include "tessera/nn/matmul.h"

namespace tessera::benchmark::kernels {
namespace {

constexpr int64_t kRows = 2048, kWidth = 512, kHidden = 1408, kVocab = 8192;

// y = a b, or what a backward does: y += a b, of which an operator makes two.
Contest product(const char* kernel, const at::Tensor& a, const at::Tensor& b,
                bool adds) {
  const int64_t rows = a.size(0), inner = a.size(1), columns = b.size(1);
  const at::Tensor y = at::zeros({rows, columns}, a.options());
  Contest contest{.kernel = kernel,
                  .dtype = a.scalar_type(),
                  .shape = c10::str(rows, "x", inner, "x", columns),
                  .flops = 2.0 * static_cast<double>(rows * inner * columns),
                  .most_ulps = a.scalar_type() == at::kFloat ? 16.0 : 2.0};
  contest.found = [=]() -> std::vector<at::Tensor> {
    const at::Tensor fresh = at::zeros_like(y);
    nn::product_into(fresh, a, b, adds);
    return {fresh};
  };
  contest.wanted = [=]() -> std::vector<Reference> {
    return {{at::mm(wide(a), wide(b)), at::mm(wide(a).abs(), wide(b).abs())}};
  };
  contest.ours = [=] { nn::product_into(y, a, b, adds); };
  contest.libtorch = [=] {
    if (adds) {
      y.add_(at::mm(a, b));
    } else {
      at::mm(a, b);
    }
  };
  return contest;
}

Contest product_forward(at::ScalarType dtype) {
  return product("product_forward", random_tensor({kRows, kWidth}, dtype, 1),
                 random_tensor({kHidden, kWidth}, dtype, 2).t(), false);
}

Contest product_dx(at::ScalarType dtype) {
  return product("product_dx", random_tensor({kRows, kHidden}, dtype, 3),
                 random_tensor({kHidden, kWidth}, dtype, 2), false);
}

Contest product_dw(at::ScalarType dtype) {
  return product("product_dw", random_tensor({kRows, kHidden}, dtype, 3).t(),
                 random_tensor({kRows, kWidth}, dtype, 1), true);
}

// Both add to a gradient that is there.
Contest embedding_backward(at::ScalarType dtype) {
  const at::Tensor ids = (random_tensor({kRows}, at::kDouble, 4).abs() * 1e6)
                             .to(at::kLong)
                             .remainder(kVocab);
  const at::Tensor dy = random_tensor({kRows, kWidth}, dtype, 5);
  const auto with_gradient = [dtype] {
    at::Tensor table = at::zeros({kVocab, kWidth}, dtype).requires_grad_();
    table.mutable_grad() = at::zeros({kVocab, kWidth}, dtype);
    return table;
  };
  const at::Tensor ours = with_gradient(), theirs = with_gradient();
  const at::Tensor y = nn::table_rows(ours, ids);
  const at::Tensor by_libtorch = at::embedding(theirs, ids);
  Contest contest{.kernel = "embedding_backward",
                  .dtype = dtype,
                  .shape = c10::str(kRows, " of ", kVocab, "x", kWidth),
                  // A row is read, and one of the gradient read and written.
                  .bytes = 3.0 * static_cast<double>(dy.nbytes()),
                  .most_ulps = 4};
  contest.found = [=]() -> std::vector<at::Tensor> {
    const at::Tensor fresh = with_gradient();
    torch::autograd::backward({nn::table_rows(fresh, ids)}, {dy});
    return {fresh.grad()};
  };
  contest.wanted = [=]() -> std::vector<Reference> {
    const at::Tensor sums = at::zeros({kVocab, kWidth}, at::kDouble);
    return {{sums.index_add(0, ids, wide(dy)),
             sums.index_add(0, ids, wide(dy).abs())}};
  };
  const auto run = [dy](const at::Tensor& rows) {
    torch::autograd::backward({rows}, {dy}, /*retain_graph=*/true);
  };
  contest.ours = [run, y] { run(y); };
  contest.libtorch = [run, by_libtorch] { run(by_libtorch); };
  return contest;
}

}  // namespace

std::vector<MakeContest> product_contests() {
  return {product_forward, product_dx, product_dw, embedding_backward};
}

}  // namespace tessera::benchmark::kernels
