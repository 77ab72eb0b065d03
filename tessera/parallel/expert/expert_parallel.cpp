#include "tessera/parallel/expert/expert_parallel.h"

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::parallel::expert {
namespace {

using mesh::Axis;
using mesh::Placement;

void set_layout(nn::Linear& linear, int64_t holder, int64_t cut_dim,
                bool is_cut) {
  mesh::Layout& layout = linear.spec("weight")->layout;
  layout = layout.of_expert_at(holder);
  if (is_cut) layout = layout.with(Axis::kEtp, Placement::shard(cut_dim));
}

void set_layouts(nn::Moe& moe, const mesh::DeviceMesh& mesh) {
  const auto count = static_cast<int64_t>(moe.experts().size());
  const int64_t each = count / mesh.degree(Axis::kEp);
  const bool is_cut = mesh.degree(Axis::kEtp) > 1;
  for (int64_t e = 0; e < count; ++e) {
    const nn::Mlp& expert = *moe.experts()[e];
    if (expert.gate()) set_layout(*expert.gate(), e / each, 0, is_cut);
    set_layout(*expert.up(), e / each, 0, is_cut);
    set_layout(*expert.down(), e / each, 1, is_cut);
  }
  // Each rank of tp sees the gate through other tokens, or other parts of the
  // experts.
  mesh::Layout& gate = moe.gate()->spec("weight")->layout;
  gate = gate.with(Axis::kTp, Placement::replicate_summed());
}

nn::ExpertShard shard_of(const ExpertOptions& options,
                         const mesh::DeviceMesh& mesh,
                         comm::Communicator& ranks) {
  const auto group = [&](std::initializer_list<Axis> axes, const char* name) {
    return ranks.make_group(mesh.peers(ranks.rank(), axes), name);
  };
  const bool whole_experts = mesh.degree(Axis::kEtp) == 1;
  nn::ExpertShard shard;
  if (mesh.degree(Axis::kEp) > 1) shard.exchange = group({Axis::kEp}, "ep");
  // The hidden states between blocks are this rank's own tokens already.
  if (options.sequence_parallel && whole_experts) {
    shard.samples = group({Axis::kCp, Axis::kTp}, "cp+tp");
    return shard;
  }
  if (mesh.degree(Axis::kCp) > 1) shard.samples = group({Axis::kCp}, "cp");
  if (mesh.degree(Axis::kTp) == 1) return shard;
  shard.copies = mesh.degree(Axis::kTp);
  shard.copy = mesh.coord_of(ranks.rank())[Axis::kTp];
  shard.shares_tokens = whole_experts;
  shard.region = options.region;
  return shard;
}

}  // namespace

void check(const models::ModelConfig& model, int64_t ep) {
  if (ep == 1) return;
  TS_CHECK_CONFIG(model.moe.experts > 0, "mesh.ep is ", ep,
                  ", but model.family ", model.family,
                  " has no experts to share out. Use model.family mixtral, or "
                  "leave mesh.ep out.");
  TS_CHECK_CONFIG(model.moe.experts % ep == 0, "mesh.ep (", ep,
                  ") does not divide model.moe.experts (", model.moe.experts,
                  "): every rank holds whole experts, as many as the others. "
                  "Use a divisor for mesh.ep. Nearest model.moe.experts: ",
                  nearest_multiples(model.moe.experts, ep), ".");
}

void apply(models::Decoder& decoder, const ExpertOptions& options,
           const mesh::DeviceMesh& mesh, comm::Communicator& ranks) {
  if (decoder.config().layers_with_experts() == 0) return;
  const nn::ExpertShard shard = shard_of(options, mesh, ranks);
  for (const auto& block : decoder.blocks()) {
    if (!block->moe()) continue;
    set_layouts(*block->moe(), mesh);
    block->moe()->set_shard(shard);
  }
}

}  // namespace tessera::parallel::expert
