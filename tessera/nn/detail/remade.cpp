#include "tessera/nn/detail/remade.h"

#include <ATen/ATen.h>

#include <array>

#include "tessera/core/error.h"
#include "tessera/nn/detail/second_derivatives.h"
#include "tessera/nn/gpu/one_pass.h"
#include "tessera/nn/gpu/program.h"
#include "tessera/nn/kernel_choice.h"

namespace tessera::nn::detail {
namespace {

using torch::autograd::CppNode;

// Loops read a weight as x's type, as long as x's rows are.
void check_norm(const at::Tensor& x, const at::Tensor& weight) {
  TS_CHECK(weight.dim() == 1 && weight.is_contiguous() && weight.size(0) > 0 &&
               x.size(-1) == weight.size(0) &&
               x.scalar_type() == weight.scalar_type() &&
               x.device() == weight.device(),
           "a norm of ", x.scalar_type(), " ", x.sizes(), " on ", x.device(),
           " by a weight of ", weight.scalar_type(), " ", weight.sizes(),
           " on ", weight.device(), ": they do not belong together.");
}

// Of x, to which what comes past the norm is added, and the weight.
variable_list rms_norm_gradients(const AutogradContext& ctx,
                                 const at::Tensor& normed,
                                 const at::Tensor& past) {
  refuse_second_derivatives("RMSNorm");
  const auto saved = ctx.get_saved_variables();
  const auto [dx, dweight] =
      rms_norm_backward(normed.contiguous(), saved[0].contiguous(), saved[1],
                        saved[2], ctx.saved_data.at("offset").toDouble(),
                        past.defined() ? past.contiguous() : past);
  return {dx, dweight, at::Tensor(), at::Tensor()};
}

// The CPU's is LibTorch's.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
    double eps) {
  if (gpu::runs(x)) {
    check_norm(x, weight);
    check_norm(x, bias);
    return gpu::layer_norm_forward(x.contiguous(), weight, bias, eps);
  }
  return at::native_layer_norm(x, weight.sizes(), weight, bias, eps);
}

// Of x, to which what comes past the norm is added, weight and bias.
variable_list layer_norm_gradients(const AutogradContext& ctx,
                                   const at::Tensor& normed,
                                   const at::Tensor& past) {
  const auto saved = ctx.get_saved_variables();
  const at::Tensor &x = saved[0], &weight = saved[1];
  if (gpu::runs(x) && !at::GradMode::is_enabled()) {
    const auto [dx, dweight, dbias] = gpu::layer_norm_backward(
        normed.contiguous(), x.contiguous(), weight, saved[3], saved[4],
        past.defined() ? past.contiguous() : past);
    return {dx, dweight, dbias, at::Tensor()};
  }
  const auto [dx, dweight, dbias] = at::native_layer_norm_backward(
      normed, x, weight.sizes(), saved[3], saved[4], weight, saved[2],
      {ctx.needs_input_grad(0), ctx.needs_input_grad(1),
       ctx.needs_input_grad(2)});
  return {past.defined() ? dx + past : dx, dweight, dbias, at::Tensor()};
}

// Which output of which node can be made again, and how.
using Node = torch::autograd::Node;
struct Maker {
  bool (*is)(const Node& node);
  uint32_t output;
  at::Tensor (*again)(const Node& node);
};

template <typename Function>
constexpr Maker maker(uint32_t output = 0) {
  return {[](const Node& node) {
            return dynamic_cast<const CppNode<Function>*>(&node) != nullptr;
          },
          output,
          [](const Node& node) {
            return Function::again(
                dynamic_cast<const CppNode<Function>&>(node).ctx_);
          }};
}

constexpr std::array kMakers = {
    maker<RmsNorm>(),   maker<RmsNormBranch>(RmsNormBranch::kNormed),
    maker<LayerNorm>(), maker<LayerNormBranch>(LayerNormBranch::kNormed),
    maker<Glu>(),       maker<Gelu>()};

using NodePointer =
    std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

struct MadeBy : torch::CustomClassHolder {
  MadeBy(NodePointer by, const Maker& with)
      : node(std::move(by)), maker(with) {}
  const NodePointer node;
  const Maker& maker;
};

constexpr const char* kMadeBy = "made_by";

Gate kind_of(const AutogradContext& ctx) {
  return static_cast<Gate>(ctx.saved_data.at("kind").toInt());
}

// Where it is recorded it is LibTorch's, which has second derivatives.
bool takes_our_gelu(const at::Tensor& x) {
  return x.is_cpu() && uses(Kernel::kGelu) && !at::GradMode::is_enabled();
}

at::Tensor gelu_of(const at::Tensor& x) {
  return takes_our_gelu(x) ? gelu_tanh(x.contiguous()) : at::gelu(x, "tanh");
}

}  // namespace

at::Tensor RmsNorm::forward(AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight, double eps,
                            double offset) {
  check_norm(x, weight);
  const auto [y, inverse_rms] =
      rms_norm_forward(x.contiguous(), weight, eps, offset);
  ctx->save_for_backward({x, weight, inverse_rms});
  ctx->saved_data["eps"] = eps;
  ctx->saved_data["offset"] = offset;
  return y;
}

variable_list RmsNorm::backward(AutogradContext* ctx,
                                const variable_list& gradients) {
  return rms_norm_gradients(*ctx, gradients[0], {});
}

at::Tensor RmsNorm::again(const AutogradContext& ctx) {
  refuse_second_derivatives("RMSNorm");
  const auto saved = ctx.get_saved_variables();
  return std::get<0>(rms_norm_forward(saved[0].contiguous(), saved[1],
                                      ctx.saved_data.at("eps").toDouble(),
                                      ctx.saved_data.at("offset").toDouble()));
}

variable_list RmsNormBranch::forward(AutogradContext* ctx, const at::Tensor& x,
                                     const at::Tensor& weight, double eps,
                                     double offset) {
  ctx->set_materialize_grads(false);  // of an output that nobody uses
  return {x, RmsNorm::forward(ctx, x, weight, eps, offset)};
}

variable_list RmsNormBranch::backward(AutogradContext* ctx,
                                      const variable_list& gradients) {
  const at::Tensor &past = gradients[0], &normed = gradients[kNormed];
  if (!normed.defined()) return {past, {}, {}, {}};
  return rms_norm_gradients(*ctx, normed, past);
}

at::Tensor RmsNormBranch::again(const AutogradContext& ctx) {
  return RmsNorm::again(ctx);
}

at::Tensor LayerNorm::forward(AutogradContext* ctx, const at::Tensor& x,
                              const at::Tensor& weight, const at::Tensor& bias,
                              double eps) {
  const auto [y, mean, rstd] = layer_norm(x, weight, bias, eps);
  ctx->save_for_backward({x, weight, bias, mean, rstd});
  ctx->saved_data["eps"] = eps;
  return y;
}

variable_list LayerNorm::backward(AutogradContext* ctx,
                                  const variable_list& gradients) {
  return layer_norm_gradients(*ctx, gradients[0], {});
}

at::Tensor LayerNorm::again(const AutogradContext& ctx) {
  const auto saved = ctx.get_saved_variables();
  return std::get<0>(layer_norm(saved[0], saved[1], saved[2],
                                ctx.saved_data.at("eps").toDouble()));
}

variable_list LayerNormBranch::forward(AutogradContext* ctx,
                                       const at::Tensor& x,
                                       const at::Tensor& weight,
                                       const at::Tensor& bias, double eps) {
  ctx->set_materialize_grads(false);
  return {x, LayerNorm::forward(ctx, x, weight, bias, eps)};
}

variable_list LayerNormBranch::backward(AutogradContext* ctx,
                                        const variable_list& gradients) {
  const at::Tensor &past = gradients[0], &normed = gradients[kNormed];
  if (!normed.defined()) return {past, {}, {}, {}};
  return layer_norm_gradients(*ctx, normed, past);
}

at::Tensor LayerNormBranch::again(const AutogradContext& ctx) {
  return LayerNorm::again(ctx);
}

at::Tensor Glu::forward(AutogradContext* ctx, Gate kind, const at::Tensor& gate,
                        const at::Tensor& up) {
  ctx->save_for_backward({gate, up});
  ctx->saved_data["kind"] = static_cast<int64_t>(kind);
  return glu(kind, gate.contiguous(), up.contiguous());
}

variable_list Glu::backward(AutogradContext* ctx,
                            const variable_list& gradients) {
  refuse_second_derivatives("A gated activation");
  const auto saved = ctx->get_saved_variables();
  const auto [dgate, dup] =
      glu_backward(kind_of(*ctx), gradients[0].contiguous(),
                   saved[0].contiguous(), saved[1].contiguous());
  return {at::Tensor(), dgate, dup};
}

at::Tensor Glu::again(const AutogradContext& ctx) {
  refuse_second_derivatives("A gated activation");
  const auto saved = ctx.get_saved_variables();
  return glu(kind_of(ctx), saved[0].contiguous(), saved[1].contiguous());
}

at::Tensor Gelu::forward(AutogradContext* ctx, const at::Tensor& x) {
  ctx->save_for_backward({x});
  return gelu_of(x);
}

variable_list Gelu::backward(AutogradContext* ctx,
                             const variable_list& gradients) {
  const at::Tensor x = ctx->get_saved_variables()[0];
  if (!takes_our_gelu(x)) {
    return {at::gelu_backward(gradients[0], x, "tanh")};
  }
  return {gelu_tanh_backward(gradients[0].contiguous(), x.contiguous())};
}

at::Tensor Gelu::again(const AutogradContext& ctx) {
  return gelu_of(ctx.get_saved_variables()[0]);
}

// What was written to since is kept, also where autograd did not hear of it.
void keep_input(AutogradContext* ctx, variable_list& saved,
                const at::Tensor& x) {
  const NodePointer node = x.defined() ? x.grad_fn() : nullptr;
  if (node && x._version() == 0 && makes_inputs_again(x.device().type())) {
    for (const Maker& each : kMakers) {
      if (x.output_nr() != each.output || !each.is(*node)) continue;
      ctx->saved_data[kMadeBy] =
          c10::IValue::make_capsule(c10::make_intrusive<MadeBy>(node, each));
      saved.emplace_back();
      return;
    }
  }
  saved.push_back(x);
}

at::Tensor input_of(AutogradContext* ctx, const variable_list& saved) {
  const auto found = ctx->saved_data.find(kMadeBy);
  if (found == ctx->saved_data.end()) return saved[0];
  const auto holder = found->second.toCapsule();
  const auto& made = static_cast<const MadeBy&>(*holder);
  return made.maker.again(*made.node);
}

}  // namespace tessera::nn::detail
