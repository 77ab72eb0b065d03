#include "tessera/nn/parameter.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <unordered_set>

#include "tessera/core/error.h"
#include "tessera/core/random.h"

namespace tessera::nn {
namespace {

using Seen = std::unordered_set<const c10::TensorImpl*>;

std::shared_ptr<ParameterSpec> spec_of(const torch::nn::Module& module,
                                       const std::string& name,
                                       const at::Tensor& tensor) {
  if (const auto* block = dynamic_cast<const Block*>(&module)) {
    return block->spec(name);
  }
  return std::make_shared<ParameterSpec>(
      ParameterSpec{mesh::Layout(tensor.sizes().vec()), Init::zeros()});
}

void collect(torch::nn::Module& module, const std::string& prefix, Seen& seen,
             std::vector<Parameter>& found) {
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
void fill_normal(const at::Tensor& out, const Parameter& parameter,
                 const mesh::Box& box, uint64_t seed) {
  const random::Stream stream(seed, parameter.name);
  const auto& shape = parameter.spec->layout.global_shape();
  const int64_t width = shape.empty() ? 1 : box.size.back();
  T* data = out.mutable_data_ptr<T>();
  at::parallel_for(0, out.numel() / width, /*grain_size=*/64,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row) {
                       stream.fill_normal(data + row * width,
                                          start_of_row(row, box, shape),
                                          static_cast<uint64_t>(width), 0.0,
                                          parameter.spec->init.std);
                     }
                   });
}

at::Tensor filled(const Parameter& parameter, const mesh::Box& box,
                  const MaterialiseOptions& options) {
  const auto there =
      at::TensorOptions().dtype(options.dtype).device(options.device);
  const Init& init = parameter.spec->init;
  if (!options.fill || box.empty()) return at::empty(box.size, there);
  if (init.kind == Init::Kind::kZeros) return at::zeros(box.size, there);
  if (init.kind == Init::Kind::kOnes) return at::ones(box.size, there);
  // Drawn in fp32 or wider, then rounded: every type has the same weights.
  const bool wide = options.dtype == at::kDouble;
  const at::Tensor drawn = at::empty(
      box.size, at::TensorOptions().dtype(wide ? at::kDouble : at::kFloat));
  wide ? fill_normal<double>(drawn, parameter, box, options.seed)
       : fill_normal<float>(drawn, parameter, box, options.seed);
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
                                    Init init) {
  specs_[name] = std::make_shared<ParameterSpec>(
      ParameterSpec{mesh::Layout(std::move(global_shape)), init});
  return register_parameter(name, at::empty({0}));
}

std::vector<Parameter> parameters_of(torch::nn::Module& root) {
  std::vector<Parameter> found;
  Seen seen;
  collect(root, "", seen, found);
  return found;
}

void materialise(torch::nn::Module& root, const mesh::DeviceMesh& mesh,
                 const mesh::Coord& coord, const MaterialiseOptions& options) {
  TS_CHECK_CONFIG(options.dtype == at::kDouble || options.dtype == at::kFloat ||
                      options.dtype == at::kBFloat16,
                  "parameters of type ", options.dtype,
                  " are not supported: fp64, fp32 and bf16 are.");
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters_of(root)) {
    const mesh::Box box = parameter.spec->layout.local_box(mesh, coord);
    parameter.tensor.set_data(filled(parameter, box, options));
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
