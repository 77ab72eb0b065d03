#include "tessera/parallel/expert/expert_parallel.h"

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::parallel::expert {
namespace {

using mesh::Axis;
using mesh::Placement;

void set_layout(const nn::Parameter& parameter, const mesh::DeviceMesh& mesh) {
  const nn::Role& role = parameter.spec->role;
  mesh::Layout& layout = parameter.spec->layout;
  if (role.of_experts) {
    layout = layout.with(Axis::kEp, Placement::shard(0));
    if (mesh.degree(Axis::kEtp) == 1) return;
    const bool is_column = role.kind == nn::Role::Kind::kColumn;
    layout = layout.with(Axis::kEtp, Placement::shard(is_column ? 1 : 2));
  }
  // Each rank of tp sees the gate through other tokens, or other parts of the
  // experts.
  if (role.kind == nn::Role::Kind::kRouter) {
    layout = layout.with(Axis::kTp, Placement::replicate_summed());
  }
}

nn::ExpertShard shard_of(const ExpertOptions& options,
                         const mesh::DeviceMesh& mesh,
                         comm::Communicator& ranks) {
  const auto group = [&](const std::vector<Axis>& axes) {
    std::string name;
    for (Axis axis : axes) {
      name += (name.empty() ? "" : "+") + std::string(mesh::name_of(axis));
    }
    return ranks.make_group(mesh.peers(ranks.rank(), axes), name);
  };
  const bool whole_experts = mesh.degree(Axis::kEtp) == 1;
  nn::ExpertShard shard;
  const auto share_samples = [&](comm::Group* samples) {
    shard.sample_parts = samples->size();
    shard.sum_samples = [samples](const at::Tensor& counts) {
      samples->all_reduce(counts, comm::ReduceOp::kSum, comm::Mode::kBlocking);
    };
  };
  if (mesh.degree(Axis::kEp) > 1) {
    comm::Group* exchange = group({Axis::kEp});
    shard.dispatch = [exchange](const at::Tensor& rows,
                                const at::Tensor& counts,
                                const nn::Experts& experts) {
      const auto run = [&experts](const at::Tensor& at_experts,
                                  const std::vector<int64_t>& splits) {
        return experts.forward(at_experts, splits);
      };
      return dispatch(rows, counts, run, *exchange);
    };
  }
  // The hidden states between blocks are this rank's own tokens already.
  if (options.sequence_parallel && whole_experts) {
    std::vector<Axis> axes = options.sample_axes;
    axes.push_back(Axis::kTp);
    share_samples(group(axes));
    return shard;
  }
  if (!options.sample_axes.empty()) share_samples(group(options.sample_axes));
  if (mesh.degree(Axis::kTp) == 1) return shard;
  shard.copies = mesh.degree(Axis::kTp);
  shard.copy = mesh.coord_of(ranks.rank())[Axis::kTp];
  shard.shares_tokens = whole_experts;
  shard.region = options.region;
  return shard;
}

}  // namespace

void check(const models::ModelConfig& model, const mesh::DeviceMesh& mesh) {
  const int64_t ep = mesh.degree(Axis::kEp);
  if (ep == 1) return;
  TS_CHECK_CONFIG(model.moe.experts > 0, "mesh.ep is ", ep,
                  ", but model.family ", model.family,
                  " has no experts to share out. Use model.family mixtral, or "
                  "leave mesh.ep out.");
  TS_CHECK_CONFIG(
      model.moe.experts % ep == 0, "mesh.ep (", ep,
      ") does not divide model.moe.experts (", model.moe.experts,
      "): every rank holds whole experts, as many as the others. "
      "Nearest mesh.ep: ",
      nearest_fitting(ep, model.moe.experts,
                      [&](int64_t n) { return model.moe.experts % n == 0; }),
      "; nearest model.moe.experts: ", nearest_multiples(model.moe.experts, ep),
      ".");
}

void place(models::Model& model, const mesh::DeviceMesh& mesh) {
  for (const auto& parameter : nn::parameters_of(model)) {
    set_layout(parameter, mesh);
  }
}

void apply(models::Model& model, const ExpertOptions& options,
           const mesh::DeviceMesh& mesh, comm::Communicator& ranks) {
  if (model.config().layers_with_experts() == 0) return;
  model.set_experts(shard_of(options, mesh, ranks));
}

}  // namespace tessera::parallel::expert
