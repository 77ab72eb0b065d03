#include "tessera/wrappers/data_parallel.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/mesh/layout.h"

namespace tessera::wrappers {
namespace {

using torch::autograd::AutogradContext;
using Tensors = std::vector<at::Tensor>;

// A device's own piece of the graph, which ends at its slices and parameters.
struct LocalGraph {
  Tensors slices;
  Tensors outputs;
  Tensors slice_gradients;  // where asked for
  Gradients gradients;      // of parameters(device)
};

// One forward through all replicas, kept until its backward.
struct Pass : torch::CustomClassHolder {
  std::shared_ptr<Replicas> replicas;
  Tensors inputs;  // without history
  std::vector<LocalGraph> graphs;

  void forward(const SliceForward& on_slices);
  void backward(const Tensors& output_gradients, bool keep);
  at::Tensor joined(size_t output) const;
  std::vector<size_t> differentiable_inputs() const;
  at::Tensor input_gradient(size_t input) const;
  void require_outputs() const;
};

bool is_cut(const at::Tensor& input) {
  return input.defined() && input.dim() > 0;
}

int64_t batch_size(const Tensors& inputs) {
  int64_t samples = -1;
  for (const at::Tensor& input : inputs) {
    if (!is_cut(input)) continue;
    TS_CHECK(samples < 0 || input.size(0) == samples,
             "data_parallel: inputs of ", samples, " and ", input.size(0),
             " samples. All tensors are cut along dim 0, which must agree.");
    samples = input.size(0);
  }
  TS_CHECK(samples >= 0, "data_parallel: forward() got no tensor to cut.");
  return samples;
}

// Slices of ceil(samples / size); device 0 takes part even without any.
size_t num_active(int64_t samples, size_t size) {
  const auto devices = static_cast<int64_t>(size);
  const int64_t rows = std::max<int64_t>((samples + devices - 1) / devices, 1);
  return std::max<int64_t>((samples + rows - 1) / rows, 1);
}

at::Tensor slice_of(const at::Tensor& input, const Replicas& replicas,
                    size_t device) {
  if (!input.defined()) return input;
  at::Tensor own = input.detach();
  if (is_cut(input)) {
    const mesh::Range rows =
        mesh::chunk_of(input.size(0), static_cast<int64_t>(replicas.size()),
                       static_cast<int64_t>(device));
    own = own.slice(0, rows.begin, rows.end);
  }
  own = own.to(replicas.devices()[device]);
  return own.requires_grad_(at::GradMode::is_enabled() &&
                            input.requires_grad());
}

void Pass::forward(const SliceForward& on_slices) {
  const size_t active = num_active(batch_size(inputs), replicas->size());
  graphs.resize(active);
  replicas->replicate(active);
  replicas->run(active, [&](size_t device) {
    LocalGraph& graph = graphs[device];
    for (const at::Tensor& input : inputs) {
      graph.slices.push_back(slice_of(input, *replicas, device));
    }
    graph.outputs = on_slices(device, graph.slices);
  });
  require_outputs();
  for (size_t device = 0; device < active; ++device) {
    for (const at::Tensor& slice : graphs[device].slices) {
      if (slice.defined()) replicas->count_batch(0, device, slice);
    }
    for (const at::Tensor& output : graphs[device].outputs) {
      replicas->count_batch(device, 0, output);
    }
  }
}

void Pass::require_outputs() const {
  for (size_t device = 0; device < graphs.size(); ++device) {
    for (const at::Tensor& output : graphs[device].outputs) {
      TS_CHECK(output.defined() && output.dim() > 0,
               "data_parallel: the replica of device ", device, " returned ",
               output.defined() ? "a tensor without dims" : "no tensor",
               ". Return one row or more a sample, and reduce on device 0: a "
               "mean of means is wrong where slices differ.");
    }
  }
}

at::Tensor Pass::joined(size_t output) const {
  Tensors parts;
  for (const LocalGraph& graph : graphs) {
    parts.push_back(graph.outputs[output].to(replicas->devices()[0]));
  }
  return at::cat(parts);
}

// Where a gradient is asked for.
std::vector<size_t> requiring_grad(const Tensors& tensors) {
  std::vector<size_t> indices;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].defined() && tensors[i].requires_grad()) {
      indices.push_back(i);
    }
  }
  return indices;
}

std::vector<size_t> Pass::differentiable_inputs() const {
  return requiring_grad(graphs[0].slices);
}

void run_backward(LocalGraph& graph, const Tensors& parameters,
                  const Tensors& output_gradients, bool keep) {
  Tensors outputs, gradients, wanted;
  for (const size_t i : requiring_grad(graph.outputs)) {
    outputs.push_back(graph.outputs[i]);
    gradients.push_back(output_gradients[i]);
  }
  const std::vector<size_t> of_slice = requiring_grad(graph.slices);
  const std::vector<size_t> of_parameter = requiring_grad(parameters);
  for (const size_t i : of_slice) wanted.push_back(graph.slices[i]);
  for (const size_t i : of_parameter) wanted.push_back(parameters[i]);
  graph.slice_gradients.assign(graph.slices.size(), {});
  graph.gradients.assign(parameters.size(), {});
  if (outputs.empty() || wanted.empty()) return;
  const Tensors found =
      torch::autograd::grad(outputs, wanted, gradients, keep,
                            /*create_graph=*/false, /*allow_unused=*/true);
  size_t next = 0;
  for (const size_t i : of_slice) graph.slice_gradients[i] = found[next++];
  for (const size_t i : of_parameter) graph.gradients[i] = found[next++];
}

void Pass::backward(const Tensors& output_gradients, bool keep) {
  std::vector<Tensors> parts(graphs.size());
  for (size_t i = 0; i < output_gradients.size(); ++i) {
    int64_t row = 0;
    for (size_t device = 0; device < graphs.size(); ++device) {
      const int64_t rows = graphs[device].outputs[i].size(0);
      parts[device].push_back(output_gradients[i].slice(0, row, row + rows));
      row += rows;
      replicas->count_batch(0, device, parts[device].back());
    }
  }
  replicas->run(graphs.size(), [&](size_t device) {
    for (at::Tensor& part : parts[device]) {
      part = part.to(replicas->devices()[device]);
    }
    run_backward(graphs[device], replicas->parameters(device), parts[device],
                 keep);
  });
}

// Joined as the input was cut; an input that went whole to all is summed.
at::Tensor Pass::input_gradient(size_t input) const {
  Tensors parts;
  bool any = false;
  for (size_t device = 0; device < graphs.size(); ++device) {
    const LocalGraph& graph = graphs[device];
    at::Tensor part = graph.slice_gradients[input];
    any = any || part.defined();
    if (!part.defined()) part = at::zeros_like(graph.slices[input]);
    replicas->count_batch(device, 0, part);
    parts.push_back(part.to(replicas->devices()[0]));
  }
  if (!any) return {};
  return is_cut(inputs[input]) ? at::cat(parts) : at::stack(parts).sum(0);
}

// Forward: joins what the replicas computed. Backward: each device runs its own
// graph in its own thread; device 0 receives the sums.
struct Join : torch::autograd::Function<Join> {
  static Tensors forward(AutogradContext* ctx,
                         const c10::intrusive_ptr<Pass>& pass,
                         at::TensorList) {  // inputs and parameters
    ctx->saved_data["pass"] = at::IValue::make_capsule(pass);
    Tensors outputs;
    for (size_t i = 0; i < pass->graphs[0].outputs.size(); ++i) {
      outputs.push_back(pass->joined(i));
    }
    return outputs;
  }

  static Tensors backward(AutogradContext* ctx, Tensors output_gradients) {
    TS_CHECK(!at::GradMode::is_enabled(),
             "data_parallel: second derivatives are not built.");
    const auto pass = c10::static_intrusive_pointer_cast<Pass>(
        ctx->saved_data["pass"].toCapsule());
    TS_CHECK(!pass->graphs.empty(),
             "data_parallel: backward ran a second time over one forward. Give "
             "retain_graph the first time.");
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    pass->backward(output_gradients, keep);

    Tensors gradients = {at::Tensor()};  // of `pass`, which is no tensor
    std::vector<Gradients> of_devices;
    for (LocalGraph& graph : pass->graphs) {
      of_devices.push_back(std::move(graph.gradients));
    }
    for (const size_t i : pass->differentiable_inputs()) {
      gradients.push_back(pass->input_gradient(i));
    }
    if (!keep) pass->graphs.clear();
    const Gradients sums = pass->replicas->sum_on_first(of_devices);
    gradients.insert(gradients.end(), sums.begin(), sums.end());
    return gradients;
  }
};

}  // namespace

std::vector<at::Tensor> scattered_forward(
    const std::shared_ptr<Replicas>& replicas,
    const std::vector<at::Tensor>& inputs, const SliceForward& forward) {
  auto pass = c10::make_intrusive<Pass>();
  pass->replicas = replicas;
  pass->inputs = inputs;
  pass->forward(forward);
  Tensors variables;
  for (const size_t i : pass->differentiable_inputs()) {
    variables.push_back(inputs[i]);
  }
  const Tensors& parameters = replicas->parameters(0);
  variables.insert(variables.end(), parameters.begin(), parameters.end());
  for (at::Tensor& input : pass->inputs) {
    if (input.defined()) input = input.detach();
  }
  return Join::apply(pass, at::TensorList(variables));
}

}  // namespace tessera::wrappers
