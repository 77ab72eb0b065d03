#include "tessera/nn/core_again.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "tessera/nn/detail/second_derivatives.h"

namespace tessera::nn {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// q, k and v are leaves of the graph that compute() makes, and not of the one
// that the core is a part of.
struct CoreAgain::State {
  Core core;
  at::Tensor q, k, v;
  c10::Storage storage;  // of y
  at::Tensor y;          // with a graph
};

namespace {

using State = CoreAgain::State;

struct Held : torch::CustomClassHolder {
  explicit Held(std::shared_ptr<State> of) : state(std::move(of)) {}
  std::shared_ptr<State> state;
};

class KeepsInputs : public torch::autograd::Function<KeepsInputs> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v,
                            const std::shared_ptr<State>& state) {
    ctx->saved_data["state"] =
        c10::IValue::make_capsule(c10::make_intrusive<Held>(state));
    const at::Tensor y = state->core(q, k, v);
    TORCH_INTERNAL_ASSERT(y.is_contiguous() && y.storage_offset() == 0);
    state->storage = y.storage();
    return y.variable_data();  // and no view, of which autograd would know
  }

  // A backward in two parts comes here twice: the graph stays until this node
  // goes.
  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    detail::refuse_second_derivatives("Attention that is computed again");
    const auto held = c10::static_intrusive_pointer_cast<Held>(
        ctx->saved_data["state"].toCapsule());
    const State& state = *held->state;
    TORCH_INTERNAL_ASSERT(state.y.defined(),
                          "a backward whose core is not computed again");
    variable_list all =
        torch::autograd::grad({state.y}, {state.q, state.k, state.v},
                              {gradients[0]}, /*retain_graph=*/true);
    all.emplace_back();  // of the state
    return all;
  }
};

}  // namespace

at::Tensor CoreAgain::forward(Core core, const at::Tensor& q,
                              const at::Tensor& k, const at::Tensor& v) {
  const auto leaf = [](const at::Tensor& x) {
    return x.detach().requires_grad_(true);
  };
  state_ = std::make_shared<State>(
      State{std::move(core), leaf(q), leaf(k), leaf(v), {}, {}});
  return KeepsInputs::apply(q, k, v, state_);
}

void CoreAgain::let_go() {
  c10::StorageImpl& storage = *state_->storage.unsafeGetStorageImpl();
  storage.set_data_ptr_noswap({nullptr, storage.device()});
  storage.set_nbytes(0);
}

// Those who kept the old y find the new one's memory in its storage.
void CoreAgain::compute() {
  const auto state = std::exchange(state_, nullptr);
  {
    const at::AutoGradMode records(true);
    state->y = state->core(state->q, state->k, state->v);
  }
  auto* const made = new c10::Storage(state->y.storage());
  c10::StorageImpl& storage = *state->storage.unsafeGetStorageImpl();
  storage.set_data_ptr_noswap(
      {made->mutable_data(), made,
       [](void* of) { delete static_cast<c10::Storage*>(of); },
       storage.device()});
  storage.set_nbytes(made->nbytes());
  state->storage = {};
}

}  // namespace tessera::nn
