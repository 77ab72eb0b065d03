// The cross-entropy of a head, alone and with the head's products.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/benchmark/kernels/contest.h"
#include "tessera/nn/loss.h"

namespace tessera::benchmark::kernels {
namespace {

constexpr int64_t kRows = 1024, kWidth = 256, kVocab = 8192;
constexpr double kScale = 1.0 / kRows;

at::Tensor targets() { return at::arange(kRows).mul(7).remainder(kVocab); }

// (softmax(z) - onehot(target)) * scale, and its two terms' absolute values.
Reference gradient_of(const at::Tensor& logits) {
  const at::Tensor p = at::softmax(logits, 1);
  const at::Tensor one =
      at::zeros_like(p).scatter_(1, targets().unsqueeze(1), 1.0);
  return {(p - one) * kScale, (p + one) * kScale};
}

at::Tensor loss_by_operators(const at::Tensor& logits) {
  return at::cross_entropy_loss(logits, targets(), {}, at::Reduction::Sum) *
         kScale;
}

// The loss and its gradient, in the logits' place.
Contest cross_entropy(at::ScalarType dtype) {
  const at::Tensor logits = random_tensor({kRows, kVocab}, dtype, 1);
  const at::Tensor leaf = logits.clone().requires_grad_();
  Contest contest{.kernel = "cross_entropy",
                  .dtype = dtype,
                  .shape = c10::str(kRows, "x", kVocab),
                  .bytes = 2.0 * static_cast<double>(logits.nbytes()),
                  .most_ulps = 16};
  contest.found = [=]() -> std::vector<at::Tensor> {
    const at::Tensor own = logits.clone();
    nn::cross_entropy(own, targets(), nullptr, kScale);
    return {own};
  };
  contest.wanted = [=]() -> std::vector<Reference> {
    return {gradient_of(wide(logits))};
  };
  const at::Tensor overwritten = logits.clone();
  contest.ours = [=] {
    nn::cross_entropy(overwritten, targets(), nullptr, kScale);
  };
  contest.libtorch = [leaf] {
    torch::autograd::grad({loss_by_operators(leaf)}, {leaf});
  };
  return contest;
}

// With the products before it and behind it; the weight's gradient is added to
// one that is there.
Contest head_loss(at::ScalarType dtype) {
  const at::Tensor hidden = random_tensor({kRows, kWidth}, dtype, 2) / 16;
  const auto weight = [dtype] {
    at::Tensor made = random_tensor({kVocab, kWidth}, dtype, 3);
    made.requires_grad_().mutable_grad() = at::zeros_like(made).detach();
    return made;
  };
  Contest contest{.kernel = "head_loss",
                  .dtype = dtype,
                  .shape = c10::str(kRows, "x", kWidth, "x", kVocab),
                  .flops = 6.0 * kRows * kWidth * kVocab,
                  .most_ulps = 64};  // a logit's error is an exponent's
  const auto run = [](const at::Tensor& x, const at::Tensor& w) {
    nn::head_loss({.weight = w, .columns = kVocab}, x, targets(), kScale);
  };
  contest.found = [=]() -> std::vector<at::Tensor> {
    const at::Tensor x = hidden.clone(), w = weight();
    run(x, w);
    return {x, w.grad()};
  };
  contest.wanted = [=]() -> std::vector<Reference> {
    const at::Tensor x = wide(hidden), w = wide(weight());
    const auto [exact, magnitude] = gradient_of(at::mm(x, w.t()));
    return {{at::mm(exact, w), at::mm(magnitude, w.abs())},
            {at::mm(exact.t(), x), at::mm(magnitude.t(), x.abs())}};
  };
  const at::Tensor overwritten = hidden.clone(), own = weight();
  contest.ours = [=] { run(overwritten, own); };
  const at::Tensor leaf = hidden.clone().requires_grad_(), theirs = weight();
  contest.libtorch = [leaf, theirs] {
    leaf.mutable_grad() = at::Tensor();
    torch::autograd::backward({loss_by_operators(at::linear(leaf, theirs))},
                              {});
  };
  return contest;
}

}  // namespace

std::vector<MakeContest> loss_contests() { return {cross_entropy, head_loss}; }

}  // namespace tessera::benchmark::kernels
