#include "tessera/wrappers/fused_adam.h"

#include <ATen/ATen.h>

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/optim/registry.h"

namespace tessera {
namespace {

using torch::optim::OptimizerParamGroup;

// Those that are updated by the same numbers, in one pass.
using Key = std::pair<int64_t, at::ScalarType>;  // step, type
using Groups = std::map<Key, optim::UpdateGroup>;

bool is_plain(const at::Tensor& tensor) {
  const bool is_strided = tensor.layout() == at::kStrided;
  return tensor.is_cpu() && is_strided && tensor.is_contiguous() &&
         (tensor.scalar_type() == at::kFloat ||
          tensor.scalar_type() == at::kDouble);
}

template <typename State>
void begin_state(State& state, const at::Tensor& parameter) {
  state.step(0);
  state.exp_avg(at::zeros_like(parameter));
  state.exp_avg_sq(at::zeros_like(parameter));
}

// A closure's loss: gradients are there when it has run.
at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  const at::AutoGradMode enabled(true);
  return closure();
}

template <typename Options, typename State, typename States>
class Pass {
 public:
  Pass(const char* rule, std::vector<OptimizerParamGroup>& groups,
       States& states)
      : rule_(optim::update_rule(rule)), groups_(groups), states_(states) {}

  // Whether the kernel serves every parameter that has a gradient.
  bool serves() const {
    for (OptimizerParamGroup& group : groups_) {
      if (options_of(group).amsgrad()) return false;
      for (const at::Tensor& each : group.params()) {
        if (each.grad().defined() && !serves(each)) return false;
      }
    }
    return true;
  }

  void run() {
    for (OptimizerParamGroup& group : groups_) {
      const Options& options = options_of(group);
      Groups alike;
      for (const at::Tensor& each : group.params()) {
        if (each.grad().defined()) add(each, options, alike);
      }
      const auto [beta1, beta2] = options.betas();
      optim::OptimizerConfig config;
      config.betas = {beta1, beta2};
      config.eps = options.eps();
      for (const auto& [key, update] : alike) rule_.update(config, update);
    }
  }

 private:
  static const Options& options_of(OptimizerParamGroup& group) {
    return static_cast<const Options&>(group.options());
  }

  bool serves(const at::Tensor& parameter) const {
    const at::Tensor& gradient = parameter.grad();
    if (!is_plain(parameter) || gradient.layout() != at::kStrided ||
        gradient.scalar_type() != parameter.scalar_type()) {
      return false;
    }
    const auto found = states_.find(parameter.unsafeGetTensorImpl());
    if (found == states_.end()) return true;
    const auto& state = static_cast<State&>(*found->second);
    return is_plain(state.exp_avg()) && is_plain(state.exp_avg_sq());
  }

  void add(const at::Tensor& parameter, const Options& options, Groups& alike) {
    auto& kept = states_[parameter.unsafeGetTensorImpl()];
    // An operator on the parameter, which fully_shard() hears where the
    // optimizer was made before it.
    const at::Tensor values = parameter.detach();
    if (kept == nullptr) {
      kept = std::make_unique<State>();
      begin_state(static_cast<State&>(*kept), values);
    }
    auto& state = static_cast<State&>(*kept);
    state.step(state.step() + 1);
    optim::UpdateGroup& update = alike[{state.step(), values.scalar_type()}];
    update.step = state.step();
    update.lr = options.lr();
    update.weight_decay = options.weight_decay();
    update.moments.resize(2);
    update.parameters.push_back(values);
    update.gradients.push_back(parameter.grad().contiguous());
    update.moments[0].push_back(state.exp_avg());
    update.moments[1].push_back(state.exp_avg_sq());
    update.copies.emplace_back();
  }

  const optim::UpdateRule& rule_;
  std::vector<OptimizerParamGroup>& groups_;
  States& states_;
};

template <typename Options, typename State, typename States>
at::Tensor step_by(const char* rule, std::vector<OptimizerParamGroup>& groups,
                   States& states,
                   const torch::optim::Optimizer::LossClosure& closure,
                   const std::function<void()>& by_libtorch) {
  const at::NoGradGuard no_grad;
  at::Tensor loss = loss_of(closure);
  Pass<Options, State, States> pass(rule, groups, states);
  if (pass.serves()) {
    pass.run();
  } else {
    by_libtorch();
  }
  return loss;
}

}  // namespace

torch::Tensor FusedAdam::step(LossClosure closure) {
  namespace to = torch::optim;
  return step_by<to::AdamOptions, to::AdamParamState>(
      "adam", param_groups_, state_, closure, [this] { Adam::step(); });
}

torch::Tensor FusedAdamW::step(LossClosure closure) {
  namespace to = torch::optim;
  return step_by<to::AdamWOptions, to::AdamWParamState>(
      "adamw", param_groups_, state_, closure, [this] { AdamW::step(); });
}

}  // namespace tessera
