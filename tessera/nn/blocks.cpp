#include "tessera/nn/blocks.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "tessera/core/error.h"
#include "tessera/nn/detail/remade.h"
#include "tessera/nn/detail/second_derivatives.h"
#include "tessera/nn/gpu/program.h"
#include "tessera/nn/kernel_choice.h"
#include "tessera/nn/matmul.h"
#include "tessera/nn/wide_type.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a Function keeps of it until its backward.
struct SavedTransform : torch::CustomClassHolder {
  explicit SavedTransform(Transform of) : transform(std::move(of)) {}
  Transform transform;
};

// Of rows of which each rank has a part: `mean` is that over the ranks. Where
// ranks hold the same part, each has a share of its gradient, and so of what
// the mean hands back.
class SharedRmsNorm : public torch::autograd::Function<SharedRmsNorm> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight, double eps,
                            const Transform& mean) {
    const at::Tensor wide = x.to(wide_type(x));
    const at::Tensor squares = mean(wide.square().mean(-1, /*keepdim=*/true));
    const at::Tensor inverse_rms = (squares + eps).rsqrt();
    ctx->save_for_backward({x, weight, inverse_rms});
    ctx->saved_data["mean"] =
        c10::IValue::make_capsule(c10::make_intrusive<SavedTransform>(mean));
    return (wide * inverse_rms * weight).to(x.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    detail::refuse_second_derivatives("RMSNorm over several ranks");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &inverse_rms = saved[2];
    const auto holder = ctx->saved_data["mean"].toCapsule();
    const auto& mean = static_cast<SavedTransform&>(*holder).transform;
    const at::Tensor gradient = gradients[0].to(wide_type(x));
    const at::Tensor normed = x.to(wide_type(x)) * inverse_rms;
    const at::Tensor pulled = gradient * weight;
    const at::Tensor pull = mean((pulled * normed).mean(-1, /*keepdim=*/true));
    const at::Tensor dx =
        ((pulled - normed * pull) * inverse_rms).to(x.scalar_type());
    const at::Tensor dweight =
        (gradient * normed).flatten(0, -2).sum(0).to(weight.scalar_type());
    return {dx, dweight, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

Linear::Linear(const LinearOptions& options)
    : options_(options),
      weight_(declare_parameter("weight", {options.out, options.in},
                                Init::normal(options.init_std), options.role)) {
  if (!options.bias) return;
  const bool is_cut = options.role.kind == Role::Kind::kColumn;
  bias_ = declare_parameter("bias", {options.out}, Init::zeros(),
                            is_cut ? options.role : Role{});
}

at::Tensor Linear::forward(const at::Tensor& x) const {
  if (!reduce_) return product(x, bias_);
  const at::Tensor y = reduce_(product(x, {}));
  return bias_.defined() ? y + bias_ : y;
}

// An adapter is inside of the sum that ranks compute parts of: what is whole on
// all of them is used in parts.
at::Tensor Linear::product(const at::Tensor& x, const at::Tensor& bias) const {
  const at::Tensor y = linear_product(x, weight_, bias, products_);
  if (!has_adapter()) return y;
  return at::add(y, linear_product(linear_product(x, lora_a_), lora_b_),
                 scale_);
}

std::vector<at::Tensor> forward_all(const at::Tensor& x,
                                    const std::vector<const Linear*>& layers) {
  std::vector<at::Tensor> weights, biases, outputs;
  bool are_plain = uses(Kernel::kJointProducts);
  for (const Linear* layer : layers) {
    are_plain = are_plain && !layer->has_adapter() && !layer->reduce_ &&
                layer->products_ == layers.front()->products_;
    weights.push_back(layer->weight_);
    if (layer->bias_.defined()) biases.push_back(layer->bias_);
  }
  are_plain &= biases.empty() || biases.size() == weights.size();
  if (are_plain) {
    return linear_products(x, weights, biases, layers.front()->products_);
  }
  for (const Linear* layer : layers) outputs.push_back(layer->forward(x));
  return outputs;
}

void Linear::add_adapter(int64_t rank, double scale) {
  const bool is_row = options_.role.kind == Role::Kind::kRow;
  const auto declare = [&](const char* name, std::vector<int64_t> shape,
                           Init init, bool follows_weight) {
    const Role role = follows_weight ? options_.role : Role::in_parts();
    const auto tensor = declare_parameter(name, std::move(shape), init, role);
    spec(name)->is_adapter = true;
    return tensor;
  };
  // As PEFT has them: A by He et al. with a = sqrt(5).
  const double bound = 1.0 / std::sqrt(static_cast<double>(options_.in));
  lora_a_ =
      declare("lora_A", {rank, options_.in}, Init::uniform(bound), is_row);
  lora_b_ = declare("lora_B", {options_.out, rank}, Init::zeros(), !is_row);
  scale_ = scale;
}

Embedding::Embedding(int64_t rows, int64_t width, double init_std, Role role)
    : weight_(declare_parameter("weight", {rows, width}, Init::normal(init_std),
                                role)) {}

at::Tensor Embedding::forward(const at::Tensor& ids) const {
  if (!reduce_) return table_rows(weight_, ids);
  const int64_t rows = weight_.size(0);
  if (rows == 0) {  // zeros that depend on the weight, as elsewhere
    auto shape = ids.sizes().vec();
    shape.push_back(weight_.size(1));
    return reduce_(at::zeros(shape, weight_.options().requires_grad(false)) +
                   weight_.sum());
  }
  const at::Tensor own = ids - first_row_;
  const at::Tensor elsewhere = (own < 0).logical_or(own >= rows);
  const at::Tensor found = table_rows(weight_, own.masked_fill(elsewhere, 0));
  return reduce_(found.masked_fill(elsewhere.unsqueeze(-1), 0));
}

void Embedding::set_rows(int64_t first_row, Transform reduce) {
  first_row_ = first_row;
  reduce_ = std::move(reduce);
}

Norm::Norm(NormKind kind, int64_t width, double eps, Role role)
    : kind_(kind),
      eps_(eps),
      weight_(declare_parameter(
          "weight", {width},
          kind == NormKind::kRmsNormPlusOne ? Init::zeros() : Init::ones(),
          role)) {
  if (kind_ == NormKind::kLayerNorm) {
    bias_ = declare_parameter("bias", {width}, Init::zeros(), role);
  }
}

at::Tensor Norm::forward(const at::Tensor& x) const {
  if (kind_ == NormKind::kLayerNorm) {
    return detail::LayerNorm::apply(x, weight_, bias_, eps_);
  }
  if (mean_) return SharedRmsNorm::apply(x, weight_, eps_, mean_);
  if (detail::has_loops(x))
    return detail::RmsNorm::apply(x, weight_, eps_, offset());
  if (kind_ == NormKind::kRmsNorm) {
    return at::rms_norm(x, weight_.sizes(), weight_, eps_);
  }
  const auto wide = wide_type(x);  // a sum with 1 is no weight of low precision
  return at::rms_norm(x.to(wide), weight_.sizes(), weight_.to(wide) + 1, eps_)
      .to(x.scalar_type());
}

std::pair<at::Tensor, at::Tensor> Norm::branch(const at::Tensor& x) const {
  const bool is_layer_norm = kind_ == NormKind::kLayerNorm;
  const bool has_loop =
      is_layer_norm ? gpu::runs(x) : !mean_ && detail::has_loops(x);
  if (!has_loop || !uses(Kernel::kNormBranch)) return {x, forward(x)};
  if (is_layer_norm) {
    const auto both = detail::LayerNormBranch::apply(x, weight_, bias_, eps_);
    return {both[0], both[detail::LayerNormBranch::kNormed]};
  }
  const auto both = detail::RmsNormBranch::apply(x, weight_, eps_, offset());
  return {both[0], both[detail::RmsNormBranch::kNormed]};
}

void Norm::set_region(const Region& region) {
  TORCH_INTERNAL_ASSERT(kind_ == NormKind::kRmsNorm);
  // Out of the region as a sum, and into it again: all ranks have it.
  mean_ = [region](const at::Tensor& x) {
    return region.enter(region.leave(x / region.ranks));
  };
}

at::Tensor activated(MlpKind kind, const at::Tensor& gate,
                     const at::Tensor& up) {
  using detail::Gate;
  if (kind == MlpKind::kGelu) return detail::Gelu::apply(up);
  const bool is_silu = kind == MlpKind::kSwiGlu;
  if (detail::has_loops(up) &&
      uses(is_silu ? Kernel::kSwiGlu : Kernel::kGeGlu)) {
    TS_CHECK(gate.sizes() == up.sizes() &&
                 gate.scalar_type() == up.scalar_type() &&
                 gate.device() == up.device(),
             "a gate of ", gate.scalar_type(), " ", gate.sizes(), " on ",
             gate.device(), " is not for ", up.scalar_type(), " ", up.sizes(),
             " on ", up.device(), ".");
    return detail::Glu::apply(is_silu ? Gate::kSilu : Gate::kGelu, gate, up);
  }
  return (is_silu ? at::silu(gate) : at::gelu(gate, "tanh")) * up;
}

Mlp::Mlp(const MlpOptions& options) : kind_(options.kind) {
  const LinearOptions in{options.width, options.hidden, options.bias,
                         options.init_std, Role::column()};
  if (has_gate(kind_)) {
    gate_ = register_module("gate", std::make_shared<Linear>(in));
  }
  up_ = register_module("up", std::make_shared<Linear>(in));
  down_ =
      register_module("down", std::make_shared<Linear>(LinearOptions{
                                  options.hidden, options.width, options.bias,
                                  options.out_init_std, Role::row()}));
}

void Mlp::set_region(const Region& region) {
  enter_ = region.enter;
  down_->set_reduction(region.leave);
}

at::Tensor Mlp::forward(const at::Tensor& input) const {
  const at::Tensor x = enter_ ? enter_(input) : input;
  if (!gate_) return down_->forward(activated(kind_, {}, up_->forward(x)));
  const auto both = forward_all(x, {gate_.get(), up_.get()});  // (B, T, F)
  return down_->forward(activated(kind_, both[0], both[1]));
}

}  // namespace tessera::nn
