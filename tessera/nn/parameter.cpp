#include "tessera/nn/parameter.h"

#include <ATen/ATen.h>

#include <unordered_set>

#include "tessera/core/error.h"
#include "tessera/core/parallel.h"
#include "tessera/core/random.h"

namespace tessera::nn {
namespace {

using SeenTensors = std::unordered_set<const c10::TensorImpl*>;

std::shared_ptr<ParameterSpec> spec_of(const torch::nn::Module& module,
                                       const std::string& name,
                                       const at::Tensor& tensor) {
  if (const auto* block = dynamic_cast<const Block*>(&module)) {
    return block->spec(name);
  }
  return std::make_shared<ParameterSpec>(
      ParameterSpec{mesh::Layout(tensor.sizes().vec()), Init::zeros()});
}

void collect(torch::nn::Module& module, const std::string& prefix,
             SeenTensors& seen, std::vector<Parameter>& found) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    found.push_back({prefix + item.key(),
                     spec_of(module, item.key(), item.value()), item.value()});
  }
  for (const auto& child : module.named_children()) {
    collect(*child.value(), prefix + child.key() + ".", seen, found);
  }
}

// The index in the whole tensor at which row `row` of the box starts; a row
// runs along the last dim.
uint64_t start_of_row(int64_t row, const mesh::Box& box,
                      const std::vector<int64_t>& shape) {
  uint64_t index = 0, stride = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    uint64_t place = static_cast<uint64_t>(box.offset[dim]);
    if (dim + 1 < shape.size()) {
      place += static_cast<uint64_t>(row % box.size[dim]);
      row /= box.size[dim];
    }
    index += place * stride;
    stride *= static_cast<uint64_t>(shape[dim]);
  }
  return index;
}

// `out`: the box, contiguous, fp32 or fp64, on the CPU.
template <typename T>
void fill_random(const at::Tensor& out, const random::Stream& stream,
                 const std::vector<int64_t>& shape, const mesh::Box& box,
                 const Init& init) {
  const int64_t width = shape.empty() ? 1 : box.size.back();
  T* data = out.mutable_data_ptr<T>();
  const auto fill_row = [&](T* row, uint64_t start) {
    if (init.kind == Init::Kind::kNormal) {
      stream.fill_normal(row, start, static_cast<uint64_t>(width), 0.0,
                         init.std);
      return;
    }
    for (int64_t i = 0; i < width; ++i) {
      row[i] = static_cast<T>(init.std * (2 * stream.uniform(start + i) - 1));
    }
  };
  parallel_for(0, out.numel() / width, /*grain=*/64,
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) {
                   fill_row(data + row * width, start_of_row(row, box, shape));
                 }
               });
}

template <typename T>
void fill_random(const at::Tensor& out, const Parameter& parameter,
                 const mesh::Box& box, uint64_t seed) {
  const auto& layout = parameter.spec->layout;
  const auto& shape = layout.global_shape();
  const Init& init = parameter.spec->init;
  if (!layout.is_of_expert()) {
    const random::Stream stream(seed, parameter.name);
    fill_random<T>(out, stream, shape, box, init);
    return;
  }
  // Experts, one by one.
  const auto rest = [](const std::vector<int64_t>& dims) {
    return std::vector<int64_t>(dims.begin() + 1, dims.end());
  };
  const auto names = names_of_experts(parameter.name, layout);
  for (int64_t e = 0; e < box.size[0]; ++e) {
    const random::Stream stream(seed, names[box.offset[0] + e]);
    fill_random<T>(out[e], stream, rest(shape),
                   {rest(box.offset), rest(box.size)}, init);
  }
}

bool is_filled(const Parameter& parameter, const MaterialiseOptions& options) {
  return options.fill || parameter.spec->is_adapter;
}

at::Tensor filled(const Parameter& parameter, const mesh::Box& box,
                  const MaterialiseOptions& options) {
  const at::ScalarType type = parameter.spec->type_in(options.dtype);
  const auto there = at::TensorOptions().dtype(type).device(options.device);
  const Init& init = parameter.spec->init;
  if (!is_filled(parameter, options) || box.empty())
    return at::empty(box.size, there);
  if (init.kind == Init::Kind::kZeros) return at::zeros(box.size, there);
  if (init.kind == Init::Kind::kOnes) return at::ones(box.size, there);
  // Drawn in fp32 or wider, then rounded: every type has the same weights.
  const bool wide = options.dtype == at::kDouble;
  const at::Tensor drawn = at::empty(
      box.size, at::TensorOptions().dtype(wide ? at::kDouble : at::kFloat));
  wide ? fill_random<double>(drawn, parameter, box, options.seed)
       : fill_random<float>(drawn, parameter, box, options.seed);
  return drawn.to(there);
}

}  // namespace

std::shared_ptr<ParameterSpec> Block::spec(const std::string& name) const {
  const auto found = specs_.find(name);
  TORCH_INTERNAL_ASSERT(found != specs_.end(), "no parameter ", name);
  return found->second;
}

at::Tensor Block::declare_parameter(const std::string& name,
                                    std::vector<int64_t> global_shape,
                                    Init init, Role role) {
  const auto view = role.of_experts ? mesh::View::kExperts : mesh::View::kDense;
  specs_[name] = std::make_shared<ParameterSpec>(
      ParameterSpec{mesh::Layout(std::move(global_shape), view), init, role});
  return register_parameter(name, at::empty({0}));
}

std::vector<std::string> names_of_experts(const std::string& parameter,
                                          const mesh::Layout& layout) {
  std::vector<std::string> names;
  if (!layout.is_of_expert()) return names;
  // Before the projection and its "weight"; at the begin, where the root itself
  // stacks experts.
  const size_t dot = parameter.rfind('.', parameter.rfind('.') - 1);
  const size_t place = dot == std::string::npos ? 0 : dot + 1;
  for (int64_t e = 0; e < layout.global_shape()[0]; ++e) {
    names.push_back(parameter.substr(0, place) + std::to_string(e) + "." +
                    parameter.substr(place));
  }
  return names;
}

std::vector<Parameter> parameters_of(torch::nn::Module& root) {
  std::vector<Parameter> found;
  SeenTensors seen;
  collect(root, "", seen, found);
  return found;
}

void materialise(torch::nn::Module& root, const mesh::DeviceMesh& mesh,
                 const mesh::Coord& coord, const MaterialiseOptions& options) {
  TS_CHECK_CONFIG(options.dtype == at::kDouble || options.dtype == at::kFloat ||
                      options.dtype == at::kBFloat16 ||
                      options.dtype == at::kHalf,
                  "parameters of type ", options.dtype,
                  " are not supported: fp64, fp32, bf16 and fp16 are.");
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters_of(root)) {
    const mesh::Box box = parameter.spec->layout.local_box(mesh, coord);
    at::Tensor tensor;
    if (options.memory) {
      tensor = options.memory(parameter, box.size,
                              parameter.spec->type_in(options.dtype));
      if (is_filled(parameter, options)) {
        tensor.copy_(filled(parameter, box, options));
      }
    } else {
      tensor = filled(parameter, box, options);
    }
    parameter.tensor.set_data(tensor);
    parameter.tensor.set_requires_grad(!parameter.spec->is_frozen);
  }
}

void materialise(torch::nn::Module& root, const MaterialiseOptions& options) {
  materialise(root, mesh::DeviceMesh(), mesh::Coord(), options);
}

int64_t num_parameters(torch::nn::Module& root) {
  int64_t total = 0;
  for (const auto& parameter : parameters_of(root)) {
    total += parameter.spec->layout.global_numel();
  }
  return total;
}

}  // namespace tessera::nn
