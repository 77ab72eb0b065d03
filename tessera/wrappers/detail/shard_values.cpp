#include "tessera/wrappers/detail/shard_values.h"

#include <ATen/ATen.h>

#include <string>

#include "tessera/core/error.h"
#include "tessera/core/memory_kind.h"
#include "tessera/mesh/slice.h"
#include "tessera/wrappers/deferred_init.h"
#include "tessera/wrappers/detail/same_parameters.h"

namespace tessera::wrappers {

using mesh::Axis;

namespace {

class Values {
 public:
  Values(const mesh::DeviceMesh& mesh, comm::Communicator& ranks,
         comm::Group& data)
      : mesh_(mesh),
        coord_(mesh.coord_of(ranks.rank())),
        data_(data),
        peers_(mesh.degree(Axis::kEp) > 1
                   ? *ranks.make_group(
                         mesh.peers(ranks.rank(),
                                    {Axis::kExpertReplicate, Axis::kExpertDp}),
                         mesh::name_of(Axis::kExpertDp))
                   : data) {}

  // Of which the first has the values.
  comm::Group& group_of(const nn::Parameter& parameter) const {
    return parameter.spec->layout.is_of_expert() ? peers_ : data_;
  }
  bool is_first_anywhere() const {
    return data_.rank() == 0 || peers_.rank() == 0;
  }

  // Of the parameter as the module has it.
  at::Tensor own_part(const nn::Parameter& parameter,
                      const at::Tensor& whole) const {
    const mesh::Layout& layout = parameter.spec->layout;
    const mesh::Box box = layout.local_box(mesh_, coord_);
    // `whole` lacks experts and parts along tp that other ranks have.
    const mesh::Box here =
        layout.with(layout.data_axis(), mesh::Placement::replicate())
            .local_box(mesh_, coord_);
    const MemoryScope scope(MemoryKind::kParameters);
    return mesh::slice(whole.detach().reshape(here.size),
                       mesh::relative(box, here))
        .clone();
  }

  at::Tensor unset(const nn::Parameter& parameter) const {
    const auto box = parameter.spec->layout.local_box(mesh_, coord_);
    const MemoryScope scope(MemoryKind::kParameters);
    return at::empty(box.size, parameter.tensor.scalar_type());
  }
  comm::Group& peers() const { return peers_; }  // with the same experts

 private:
  const mesh::DeviceMesh& mesh_;
  const mesh::Coord coord_;
  comm::Group& data_;
  comm::Group& peers_;
};

at::Tensor unset_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.scalar_type());
}

// The same tensor for all who have it, with other memory.
void become(const at::Tensor& tensor, const at::Tensor& values) {
  if (tensor.is_meta()) {
    tensor.unsafeGetTensorImpl()->shallow_copy_from(values.getIntrusivePtr());
  } else {
    tensor.set_data(values);
  }
}

void check(const std::vector<nn::Parameter>& parameters, comm::Group& data,
           const DeferredInit* deferred) {
  std::vector<NamedParameter> named;
  for (const auto& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    TS_CHECK_CONFIG(!tensor.grad().defined(), "fully_shard: ", parameter.name,
                    " has a gradient already. Shard the module first, or call "
                    "zero_grad().");
    TS_CHECK_CONFIG(!tensor.is_meta() || (deferred && deferred->made(tensor)),
                    "fully_shard: ", parameter.name,
                    " has no values: it is of the device meta, ",
                    deferred ? "and was not made in the DeferredInit's make(), "
                               "or was replaced since."
                             : "and options.deferred is null.");
    named.push_back({parameter.name, tensor});
  }
  TS_CHECK_CONFIG(!named.empty(), "fully_shard: the module has no parameters.");
  require_same_parameters(named, data);
}

// One after the other: each is whole on this rank but for a moment.
void replay(torch::nn::Module& module,
            const std::vector<nn::Parameter>& parameters, const Values& values,
            comm::Group& data, const DeferredInit& deferred) {
  std::vector<at::Tensor> tensors;
  std::vector<const nn::Parameter*> of;  // null: a buffer
  for (const auto& parameter : parameters) {
    tensors.push_back(parameter.tensor);
    of.push_back(&parameter);
  }
  for (const auto& buffer : module.buffers()) {
    if (!buffer.is_meta()) continue;
    tensors.push_back(buffer);
    of.push_back(nullptr);
  }
  deferred.replay(
      tensors, values.is_first_anywhere(),
      [&](size_t i, const at::Tensor& value) {
        const at::Tensor& tensor = tensors[i];
        comm::Group& group = of[i] ? values.group_of(*of[i]) : data;
        const at::Tensor whole =
            group.rank() == 0 ? value.contiguous() : unset_like(tensor);
        broadcast_all({whole}, group, /*root=*/0);
        become(tensor, of[i] ? values.own_part(*of[i], whole) : whole);
      });
}

}  // namespace

void take_values(torch::nn::Module& module,
                 const std::vector<nn::Parameter>& parameters,
                 const mesh::DeviceMesh& mesh, comm::Communicator& ranks,
                 comm::Group& data, const FullyShardOptions& options) {
  check(parameters, data, options.deferred);
  const Values values(mesh, ranks, data);
  std::vector<nn::Parameter> deferred, made;
  std::vector<at::Tensor> common = module.buffers(), of_experts;
  for (const auto& parameter : parameters) {
    if (parameter.tensor.is_meta()) {
      deferred.push_back(parameter);
      continue;
    }
    made.push_back(parameter);
    const bool is_of_expert = parameter.spec->layout.is_of_expert();
    (is_of_expert ? of_experts : common).push_back(parameter.tensor);
  }
  if (options.deferred_values && options.deferred) {
    replay(module, deferred, values, data, *options.deferred);
  } else {
    for (const auto& each : deferred) become(each.tensor, values.unset(each));
    for (const auto& each : common) {
      if (each.is_meta()) become(each, unset_like(each));
    }
  }
  broadcast_all(common, data, /*root=*/0);
  if (!of_experts.empty()) {
    broadcast_all(of_experts, values.peers(), /*root=*/0);
  }
  for (const auto& each : made) {
    become(each.tensor, values.own_part(each, each.tensor));
  }
}

}  // namespace tessera::wrappers
