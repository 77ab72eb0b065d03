#include "tessera/models/ahead_module.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace tessera::models {
namespace {

// The gradient of what is in front is no view, whose memory would be that of
// both for as long as a unit before works with it.
class PutBehind : public torch::autograd::Function<PutBehind> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& before, const at::Tensor& y) {
    ctx->saved_data["samples"] = before.size(0);
    return at::cat({before, y});
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      const torch::autograd::variable_list& gradients) {
    const at::Tensor& both = gradients[0];
    const int64_t samples = ctx->saved_data["samples"].toInt();
    return {both.narrow(0, 0, samples).clone(),
            both.narrow(0, samples, both.size(0) - samples)};
  }
};

}  // namespace

AheadModule::AheadModule(const AheadOptions& options) {
  const auto norm = [&](const char* name) {
    return register_module(
        name, std::make_shared<nn::Norm>(options.norm, options.width,
                                         options.norm_eps));
  };
  token_norm_ = norm("token_norm");
  hidden_norm_ = norm("hidden_norm");
  proj_ =
      register_module("proj", std::make_shared<nn::Linear>(nn::LinearOptions{
                                  .in = 2 * options.width,
                                  .out = options.width,
                                  .init_std = options.init_std}));
  norm_ = norm("norm");
}

at::Tensor AheadModule::enter(const at::Tensor& embedded,
                              const at::Tensor& hidden) const {
  const at::Tensor both =
      at::cat({token_norm_->forward(embedded), hidden_norm_->forward(hidden)},
              /*dim=*/-1);
  return proj_->forward(both);
}

at::Tensor AheadModule::leave(const at::Tensor& before,
                              const at::Tensor& y) const {
  return PutBehind::apply(before, norm_->forward(y));
}

}  // namespace tessera::models
