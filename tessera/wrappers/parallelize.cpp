#include "tessera/wrappers/parallelize.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/comm/autograd.h"
#include "tessera/core/error.h"
#include "tessera/wrappers/detail/heard_memory.h"
#include "tessera/wrappers/detail/heard_products.h"
#include "tessera/wrappers/detail/module_units.h"
#include "tessera/wrappers/detail/same_parameters.h"
#include "tessera/wrappers/detail/shares.h"
#include "tessera/wrappers/moe.h"

namespace tessera {

using torch::nn::Module;
using wrappers::share_of;
using Kind = ParallelStyle::Kind;

namespace {

// By line. One that names nothing here may name what another stage has.
std::vector<bool> named_here(Module& module, const mesh::DeviceMesh& mesh,
                             comm::Communicator& ranks,
                             const ParallelPlan& plan) {
  std::vector<bool> here;
  at::Tensor anywhere = at::zeros({std::ssize(plan)}, at::kInt);
  for (size_t line = 0; line < plan.size(); ++line) {
    here.push_back(wrappers::has_match(module, plan[line].modules));
    anywhere[static_cast<int64_t>(line)] = here.back() ? 1 : 0;
  }
  if (mesh.degree(mesh::Axis::kPp) > 1) {
    ranks.world().all_reduce(anywhere, comm::ReduceOp::kMax).synchronize();
  }
  for (size_t line = 0; line < plan.size(); ++line) {
    if (anywhere[static_cast<int64_t>(line)].item<int>() > 0) continue;
    wrappers::modules_matching(module, {plan[line].modules}, "parallelize");
  }
  return here;
}

// By name: experts of which ranks along tp have different ones.
std::vector<std::string> experts_apart(const Module& module,
                                       const mesh::DeviceMesh& mesh,
                                       int64_t rank) {
  std::vector<std::string> found;
  const bool cuts_experts =
      mesh.degree(mesh::Axis::kEtp) == mesh.degree(mesh::Axis::kTp);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    const auto* here =
        dynamic_cast<const wrappers::LocalExperts*>(item.value().get());
    if (!here) continue;
    here->check("parallelize", item.key(), mesh, rank);
    if (here->ranks() > 1 && !cuts_experts) found.push_back(item.key());
  }
  return found;
}

bool is_within(const std::string& name, const std::string& outer) {
  return name == outer || outer.empty() || name.starts_with(outer + ".");
}

// What every rank along tp has alike, but for what a plan cuts.
std::vector<at::Tensor> common_values(const Module& module,
                                      const std::vector<std::string>& apart) {
  std::vector<at::Tensor> values;
  for (const auto& tensors :
       {module.named_parameters(), module.named_buffers()}) {
    for (const auto& item : tensors) {
      if (std::ranges::none_of(apart, [&](const std::string& experts) {
            return is_within(item.key(), experts);
          })) {
        values.push_back(item.value());
      }
    }
  }
  return values;
}

void refuse_experts_apart(const std::string& name,
                          const std::vector<std::string>& apart) {
  for (const std::string& experts : apart) {
    TS_CHECK_CONFIG(!is_within(name, experts) && !is_within(experts, name),
                    "parallelize: \"", name,
                    "\" is cut, but on this mesh an "
                    "expert of \"",
                    experts,
                    "\" is whole on its rank. Set etp to tp, or leave it out "
                    "of the plan.");
  }
}

}  // namespace

struct Parallelized::Impl : wrappers::Substitute {
  // `named_here`: by line, whether it names anything in this module.
  Impl(Module& module, comm::Group& along_tp, const ParallelPlan& plan,
       const std::vector<bool>& named_here,
       const std::vector<std::string>& experts_apart);

  void add(const std::string& name, Module& module, const ParallelStyle& style);
  void cut(const std::string& name, at::Tensor& parameter, int64_t dim,
           int64_t tag);
  bool run(const c10::OperatorHandle& op, torch::jit::Stack* stack,
           int64_t tag) override;

  struct Part {
    std::string name;
    ParallelStyle style;
    at::Tensor weight = {};    // of a linear: this rank's share
    at::Tensor bias = {};      // as it is here
    int64_t padding_idx = -1;  // of an Embedding: an entry of all, or none

    bool is_linear() const {
      return style.kind == Kind::kColumn || style.kind == Kind::kRow;
    }
    bool is_weight(const at::Tensor& tensor) const;
    bool is_weight_transposed(const at::Tensor& tensor) const;
    bool is_bias(const at::Tensor& tensor) const;
    // Wrong with a share also where no gradient is recorded.
    bool is_of_forward(const std::string& op,
                       at::ArrayRef<c10::IValue> arguments) const;
  };
  const comm::Group& group() const override { return tp; }
  void sum_gradients(torch::jit::Stack* stack, size_t count);
  at::Tensor computed(const std::string& op,
                      at::ArrayRef<c10::IValue> arguments, const Part& part);
  at::Tensor rows_of(at::ArrayRef<c10::IValue> arguments, const Part& part);
  at::Tensor bias_behind(const at::Tensor& bias, const ParallelStyle& style);

  comm::Group& tp;
  std::vector<Part> parts;              // by tag
  std::vector<at::Tensor> by_sequence;  // of parts that see a part of it
  wrappers::SubstitutedParameters parameters;
};

Parallelized::Impl::Impl(Module& module, comm::Group& along_tp,
                         const ParallelPlan& plan,
                         const std::vector<bool>& named_here,
                         const std::vector<std::string>& experts_apart)
    : tp(along_tp), parameters(*this) {
  wrappers::broadcast_all(common_values(module, experts_apart), tp,
                          /*root=*/0);
  std::map<std::string, size_t> line_of;
  for (size_t line = 0; line < plan.size(); ++line) {
    check(plan[line].style);
    if (!named_here[line]) continue;
    for (const auto& [name, child] : wrappers::modules_matching(
             module, {plan[line].modules}, "parallelize")) {
      const auto [found, is_new] = line_of.try_emplace(name, line);
      TS_CHECK_CONFIG(is_new, "parallelize: \"", name,
                      "\" is named by two lines of the plan: \"",
                      plan[found->second].modules, "\" and \"",
                      plan[line].modules, "\".");
      refuse_experts_apart(name, experts_apart);
      add(name, *child, plan[line].style);
    }
  }
}

void Parallelized::Impl::add(const std::string& name, Module& module,
                             const ParallelStyle& style) {
  const auto tag = static_cast<int64_t>(parts.size());
  parts.push_back({name, style});
  if (style.kind == Kind::kSequence) {
    for (auto& parameter : module.parameters()) {
      parameters.add(parameter, tag, /*shared_dim=*/-1);
      by_sequence.push_back(parameter);
    }
    return;
  }
  if (style.kind == Kind::kVocabulary) {
    auto* const embedding = module.as<torch::nn::EmbeddingImpl>();
    TS_CHECK_CONFIG(embedding, "parallelize: \"", name, "\" is a ",
                    module.name(),
                    ", and the style vocabulary is for an "
                    "Embedding.");
    auto& options = embedding->options;
    TS_CHECK_CONFIG(
        !options.scale_grad_by_freq() && !options.max_norm() &&
            !options.sparse(),
        "parallelize: \"", name,
        "\" has scale_grad_by_freq, max_norm or sparse, which no rank can do "
        "for its share of the entries alone. Leave it out of the plan.");
    // Embedding itself would look for it among the entries that are here.
    parts.back().padding_idx = options.padding_idx().value_or(-1);
    options.padding_idx(std::nullopt);
    return cut(name + ".weight", embedding->weight, style.weight_dim(), tag);
  }
  auto* const linear = module.as<torch::nn::LinearImpl>();
  TS_CHECK_CONFIG(linear, "parallelize: \"", name, "\" is a ", module.name(),
                  ", and the styles column and row are for a Linear.");
  cut(name + ".weight", linear->weight, style.weight_dim(), tag);
  parts.back().weight = linear->weight;
  if (linear->bias.defined()) {
    cut(name + ".bias", linear->bias, style.kind == Kind::kColumn ? 0 : -1,
        tag);
    parts.back().bias = linear->bias;
  }
}

void Parallelized::Impl::cut(const std::string& name, at::Tensor& parameter,
                             int64_t dim, int64_t tag) {
  parameter.set_data(share_of(parameter, dim, tp, name));
  parameters.add(parameter, tag, dim);
}

bool Parallelized::Impl::run(const c10::OperatorHandle& op,
                             torch::jit::Stack* stack, int64_t tag) {
  const Part& part = parts.at(tag);
  const size_t count = op.schema().arguments().size();
  if (part.style.kind == Kind::kSequence) {
    sum_gradients(stack, count);
    return false;
  }
  const std::string& name = op.schema().name();
  // A view, by which Linear multiplies; and what asks for its shape alone.
  if (name == "aten::t" || name == "aten::transpose" ||
      name.ends_with("_like")) {
    return false;
  }
  const auto arguments = torch::jit::last(*stack, count);
  // Who detaches a share wants the share.
  const at::Tensor y = name == "aten::detach"
                           ? wrappers::unheard(arguments[0].toTensor())
                           : computed(name, arguments, part);
  if (y.defined()) {
    torch::jit::drop(*stack, count);
    stack->emplace_back(y);
    return true;
  }
  TS_CHECK(!at::GradMode::is_enabled() && !part.is_of_forward(name, arguments),
           "parallelize: \"", part.name, "\" computes ", name,
           " with a parameter of which this rank has a share. What is shared "
           "out is for the products of Linear and for Embedding alone: leave "
           "it out of the plan, or write the module with ColumnParallelLinear "
           "and RowParallelLinear. (What trains nothing, as first values, goes "
           "under NoGradGuard.)");
  return false;
}

// Each rank's part of the sequence gives a part of the parameters' gradients.
// An input may be a leaf too, as recompute()'s are: its gradient is whole.
void Parallelized::Impl::sum_gradients(torch::jit::Stack* stack, size_t count) {
  if (!at::GradMode::is_enabled()) return;
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& argument = torch::jit::peek(*stack, i, count);
    if (!argument.isTensor() || !argument.toTensor().requires_grad()) continue;
    const at::Tensor tensor = argument.toTensor();
    const bool is_parameter = std::ranges::any_of(
        by_sequence,
        [&](const at::Tensor& each) { return each.is_same(tensor); });
    if (is_parameter) argument = comm::identity_with_all_reduce(tensor, tp);
  }
}

// By shape too: a row and a column lie alike. A transposed share that is taken
// for the share is one of something else.
bool Parallelized::Impl::Part::is_weight(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.is_alias_of(weight) &&
         tensor.is_contiguous() && tensor.sizes() == weight.sizes();
}

bool Parallelized::Impl::Part::is_weight_transposed(
    const at::Tensor& tensor) const {
  return tensor.defined() && tensor.dim() == 2 && is_weight(tensor.t());
}

bool Parallelized::Impl::Part::is_bias(const at::Tensor& tensor) const {
  return bias.defined() && tensor.defined() && tensor.is_alias_of(bias) &&
         tensor.sizes() == bias.sizes();
}

bool Parallelized::Impl::Part::is_of_forward(
    const std::string& op, at::ArrayRef<c10::IValue> arguments) const {
  if (!is_linear()) return op.starts_with("aten::embedding");
  const bool is_product = op == "aten::linear" || op == "aten::matmul" ||
                          op == "aten::mm" || op == "aten::addmm";
  return is_product &&
         std::ranges::any_of(arguments, [&](const c10::IValue& argument) {
           return argument.isTensor() &&
                  (is_weight(argument.toTensor()) ||
                   is_weight_transposed(argument.toTensor()));
         });
}

// What Linear and Embedding call, as they call it; undefined: something else.
at::Tensor Parallelized::Impl::computed(const std::string& op,
                                        at::ArrayRef<c10::IValue> arguments,
                                        const Part& part) {
  // More of them: the form that writes into a tensor that it is given.
  const size_t count = arguments.size();
  if (!part.is_linear()) {
    return op == "aten::embedding" && count == 5 ? rows_of(arguments, part)
                                                 : at::Tensor();
  }
  const auto tensor = [&](size_t i) {
    return arguments[i].isTensor() ? arguments[i].toTensor() : at::Tensor();
  };
  const auto linear = [&](const at::Tensor& x, const at::Tensor& weight,
                          const at::Tensor& bias) {
    return parallel_linear(x, weight, bias, part.style, tp);
  };
  if (op == "aten::linear" && count == 3 && part.is_weight(tensor(1))) {
    return linear(tensor(0), tensor(1), tensor(2));
  }
  if ((op == "aten::matmul" || op == "aten::mm") && count == 2 &&
      part.is_weight_transposed(tensor(1))) {
    return linear(tensor(0), tensor(1).t(), {});
  }
  if (op == "aten::addmm" && count == 5 &&
      part.is_weight_transposed(tensor(2)) && part.is_bias(tensor(0)) &&
      wrappers::is_one(arguments[3]) && wrappers::is_one(arguments[4])) {
    return linear(tensor(1), tensor(2).t(), tensor(0));
  }
  // Behind a product; an optimizer's updates are other sums.
  if (op == "aten::add_" && part.is_bias(tensor(1)) &&
      !tensor(0).is_alias_of(part.bias) && wrappers::is_one(arguments[2])) {
    return at::Tensor(tensor(0)).add_(bias_behind(tensor(1), part.style));
  }
  return {};
}

// Of aten::embedding's arguments.
at::Tensor Parallelized::Impl::rows_of(at::ArrayRef<c10::IValue> arguments,
                                       const Part& part) {
  const bool scales = arguments[3].toBool(), is_sparse = arguments[4].toBool();
  if (scales || is_sparse) return {};
  const int64_t padding_idx = std::max(arguments[2].toInt(), part.padding_idx);
  return parallel_embedding(arguments[1].toTensor(), arguments[0].toTensor(),
                            part.style, tp, padding_idx);
}

// As it is added to what a product gave.
at::Tensor Parallelized::Impl::bias_behind(const at::Tensor& bias,
                                           const ParallelStyle& style) {
  if (style.kind == Kind::kColumn && style.output == Lies::kWhole) {
    return comm::all_gather_with_split(bias, 0, tp);
  }
  if (style.kind == Kind::kRow && style.output == Lies::kBySequence) {
    return comm::identity_with_all_reduce(bias, tp);
  }
  return bias;
}

Parallelized::Parallelized(Module& module, const mesh::DeviceMesh& mesh,
                           comm::Communicator& ranks,
                           const ParallelPlan& plan) {
  TS_CHECK_CONFIG(mesh.world_size() == ranks.world_size(),
                  "parallelize: the mesh is of ", mesh.world_size(), " ranks (",
                  mesh.describe(), "), the communicator of ",
                  ranks.world_size(), ".");
  comm::Group& tp =
      *ranks.make_group(mesh.peers(ranks.rank(), {mesh::Axis::kTp}), "tp");
  impl_ = std::make_unique<Impl>(module, tp, plan,
                                 named_here(module, mesh, ranks, plan),
                                 experts_apart(module, mesh, ranks.rank()));
}

Parallelized::~Parallelized() = default;
Parallelized::Parallelized(Parallelized&&) noexcept = default;

Parallelized parallelize(Module& module, const mesh::DeviceMesh& mesh,
                         comm::Communicator& ranks, const ParallelPlan& plan) {
  return {module, mesh, ranks, plan};
}

}  // namespace tessera
