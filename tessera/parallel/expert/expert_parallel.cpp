#include "tessera/parallel/expert/expert_parallel.h"

#include "tessera/comm/autograd.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/models/family.h"

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

nn::ExpertShard shard_of(const ExpertOptions& options, bool balances_batch,
                         const mesh::DeviceMesh& mesh,
                         comm::Communicator& ranks) {
  const auto group = [&](const std::vector<Axis>& axes) {
    return ranks.make_group(mesh.peers(ranks.rank(), axes),
                            mesh::group_name_of(axes));
  };
  const bool whole_experts = mesh.degree(Axis::kEtp) == 1;
  nn::ExpertShard shard;
  const auto share_samples = [&](comm::Group* samples) {
    shard.sample_parts = samples->size();
    shard.sample_part = samples->rank();
    shard.sum_samples = [samples](const at::Tensor& counts) {
      samples->all_reduce(counts, comm::ReduceOp::kSum, comm::Mode::kBlocking);
    };
    shard.gather_samples = [samples](const at::Tensor& mine) {
      auto shape = mine.sizes().vec();
      shape.insert(shape.begin(), samples->size());
      const at::Tensor all = at::empty(shape, mine.options());
      samples->all_gather(all, mine.contiguous(), comm::Mode::kBlocking);
      return all.transpose(0, 1).flatten(1, 2);
    };
  };
  if (mesh.degree(Axis::kEp) > 1) {
    comm::Group* exchange = group({Axis::kEp});
    shard.dispatch = [exchange, chunks = options.dispatch_chunks](
                         const at::Tensor& rows, const at::Tensor& counts,
                         const nn::Experts& experts,
                         const std::function<void()>& beside) {
      const auto run = [&experts](const at::Tensor& at_experts,
                                  const std::vector<int64_t>& splits) {
        return experts.forward(at_experts, nn::RowGroups(splits));
      };
      return dispatch(rows, counts, run, *exchange, {chunks, beside});
    };
  }
  std::vector<Axis> axes = options.sample_axes;
  const bool over_tp = mesh.degree(Axis::kTp) > 1;
  if (over_tp && whole_experts) {  // each rank has tokens of its own
    axes.push_back(Axis::kTp);
    if (!options.sequence_parallel) {
      shard.split = split_over(*group({Axis::kTp}));
    }
  }
  if (!axes.empty()) share_samples(group(axes));
  if (balances_batch) {
    comm::Group* batch = group(axes_of_batch(axes));
    shard.sum_batch = [batch](const at::Tensor& counts) {
      batch->all_reduce(counts, comm::ReduceOp::kSum, comm::Mode::kBlocking);
    };
  }
  if (!over_tp || whole_experts) return shard;
  shard.copies = mesh.degree(Axis::kTp);
  shard.copy = mesh.coord_of(ranks.rank())[Axis::kTp];
  shard.region = options.region;
  return shard;
}

void check_capacity(const models::MoeConfig& moe, int64_t seq_len) {
  if (moe.experts == 0 || moe.capacity_factor == 0) return;
  const int64_t capacity =
      nn::capacity_of(moe.capacity_factor, seq_len, moe.top_k, moe.experts);
  TS_CHECK_CONFIG(
      capacity >= 1, "model.moe.capacity_factor (", moe.capacity_factor,
      ") leaves an expert less than one token of a sample: of data.seq_len (",
      seq_len, ") x model.moe.top_k (", moe.top_k, ") over ", moe.experts,
      " experts. Every token would be dropped. Use ",
      static_cast<double>(moe.experts) /
          static_cast<double>(seq_len * moe.top_k),
      " or more, or 0, which drops none.");
}

// What a layer behind another stage routes is not known here.
void check_balance(const models::ModelConfig& model,
                   const mesh::DeviceMesh& mesh) {
  const int64_t layers = model.layers_with_experts();
  const bool multiplies =
      model.moe.balance == "batch" && !model.moe.experts_choose();
  TS_CHECK_CONFIG(!multiplies || mesh.degree(Axis::kPp) == 1 || layers <= 1,
                  "model.moe.balance batch multiplies means over all ", layers,
                  " layers with experts, which mesh.pp ",
                  mesh.degree(Axis::kPp),
                  " has on several stages. Use mesh.pp 1, or model.moe.balance "
                  "layer, whose "
                  "means are those of a layer, or sample.");
}

}  // namespace

nn::TokenSplit split_over(comm::Group& ranks) {
  constexpr int64_t kTokenDim = 1;  // of (B, T, D)
  comm::Group* group = &ranks;
  return {.ranks = ranks.size(),
          .rank = ranks.rank(),
          .split =
              [group](const at::Tensor& x) {
                return comm::split_with_all_gather(x, kTokenDim, *group);
              },
          .join =
              [group](const at::Tensor& y, int64_t tokens) {
                return comm::all_gather_with_split(y, kTokenDim, *group,
                                                   tokens);
              }};
}

std::vector<mesh::Range> expert_chunks(int64_t experts, int64_t chunks) {
  std::vector<mesh::Range> all;
  for (int64_t i = 0; i < chunks; ++i) {
    const mesh::Range range = mesh::chunk_of(experts, chunks, i);
    if (range.size() > 0) all.push_back(range);
  }
  return all;
}

std::vector<mesh::Axis> axes_of_batch(std::vector<mesh::Axis> sample_axes) {
  sample_axes.insert(sample_axes.begin(), {Axis::kDpReplicate, Axis::kDpShard});
  return sample_axes;
}

void check(const models::ModelConfig& model, int64_t seq_len,
           const mesh::DeviceMesh& mesh) {
  check_capacity(model.moe, seq_len);
  check_balance(model, mesh);
  const int64_t ep = mesh.degree(Axis::kEp);
  if (ep == 1) return;
  TS_CHECK_CONFIG(
      model.moe.experts > 0, "mesh.ep is ", ep, ", but model.family ",
      model.family,
      " has no experts to share out. Use a model.family with experts "
      "(",
      models::families_with_experts(), "), or leave mesh.ep out.");
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
  const bool balances_batch = model.config().moe.balance != "sample";
  model.set_experts(shard_of(options, balances_batch, mesh, ranks));
}

}  // namespace tessera::parallel::expert
