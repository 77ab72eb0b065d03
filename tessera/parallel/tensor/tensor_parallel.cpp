#include "tessera/parallel/tensor/tensor_parallel.h"

#include "tessera/comm/autograd.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::parallel::tensor {
namespace {

using mesh::Axis;
using mesh::Placement;

constexpr int64_t kSequenceDim = 1;  // of (B, T, D)

void place(nn::Block& block, const std::string& parameter,
           const Placement& placement) {
  mesh::Layout& layout = block.spec(parameter)->layout;
  layout = layout.with(Axis::kTp, placement);
}

bool has_bias(const nn::Block& block) {
  return block.named_parameters(/*recurse=*/false).contains("bias");
}

class Cutter {
 public:
  Cutter(const TensorOptions& options, comm::Group& group)
      : options_(options), group_(group), region_(region(options, group)) {}

  void cut(models::Decoder& decoder) const {
    for (const auto& block : decoder.blocks()) cut(*block, decoder.config());
    norm(*decoder.final_norm());
    vocabulary(decoder);
  }

 private:
  bool sequence() const { return options_.sequence_parallel; }

  // Of a parameter that every rank uses on all tokens alike, or with sequence
  // parallelism on its own tokens.
  Placement whole() const {
    return sequence() ? Placement::replicate_summed() : Placement::replicate();
  }

  void norm(nn::Norm& norm) const {
    place(norm, "weight", whole());
    if (has_bias(norm)) place(norm, "bias", whole());
  }

  static void columns(nn::Linear& linear, int64_t copies = 1) {
    place(linear, "weight", Placement::shard(0, copies));
    if (has_bias(linear)) place(linear, "bias", Placement::shard(0, copies));
  }

  void rows(nn::Linear& linear) const {
    place(linear, "weight", Placement::shard(1));
    if (has_bias(linear)) place(linear, "bias", whole());
    linear.set_reduction(region_.leave);
  }

  void cut(models::DecoderBlock& block,
           const models::ModelConfig& config) const {
    norm(*block.attention_norm());
    nn::Attention& attention = *block.attention();
    attention.set_entrance(region_.enter);
    const int64_t copies =
        std::max<int64_t>(1, group_.size() / config.kv_heads);
    columns(*attention.q());
    columns(*attention.k(), copies);
    columns(*attention.v(), copies);
    rows(*attention.o());
    // Every rank norms its own heads.
    for (const auto& each : {attention.q_norm(), attention.k_norm()}) {
      if (each) place(*each, "weight", Placement::replicate_summed());
    }

    norm(*block.mlp_norm());
    if (!block.mlp()) return;  // experts have a view of their own
    nn::Mlp& mlp = *block.mlp();
    mlp.set_entrance(region_.enter);
    if (mlp.gate()) columns(*mlp.gate());
    columns(*mlp.up());
    rows(*mlp.down());
  }

  void vocabulary(models::Decoder& decoder) const {
    const int64_t entries = decoder.config().vocab;
    const int64_t first =
        mesh::chunk_of(entries, group_.size(), group_.rank()).begin;
    place(*decoder.tokens(), "weight", Placement::shard(0));
    decoder.tokens()->set_rows(first, region_.leave);
    if (decoder.positions()) place(*decoder.positions(), "weight", whole());
    if (decoder.head()) columns(*decoder.head());
    decoder.set_head(region_.enter, {first, entries, &group_});
    if (sequence()) decoder.set_sequence_shard(group_.rank(), group_.size());
  }

  const TensorOptions options_;
  comm::Group& group_;
  const nn::Region region_;
};

}  // namespace

void check(const models::ModelConfig& model, int64_t seq_len,
           const TensorOptions& options) {
  const int64_t tp = options.degree;
  TS_CHECK_CONFIG(
      !options.sequence_parallel || tp > 1,
      "tensor.sequence_parallel is true, but mesh.tp is 1: there is "
      "nothing to cut the sequence over. Set mesh.tp to 2 or more, "
      "or leave tensor.sequence_parallel out.");
  if (tp == 1) return;
  TS_CHECK_CONFIG(model.heads % tp == 0, "mesh.tp (", tp,
                  ") does not divide model.heads (", model.heads,
                  "): every rank computes whole heads. Nearest model.heads: ",
                  nearest_multiples(model.heads, tp), ".");
  TS_CHECK_CONFIG(model.kv_heads % tp == 0 || tp % model.kv_heads == 0,
                  "mesh.tp (", tp, ") and model.kv_heads (", model.kv_heads,
                  "): one must divide the other, so that every rank has whole "
                  "key/value heads. Nearest model.kv_heads: ",
                  nearest_multiples(model.kv_heads, tp), ".");
  TS_CHECK_CONFIG(!options.sequence_parallel || seq_len % tp == 0, "mesh.tp (",
                  tp, ") does not divide data.seq_len (", seq_len,
                  "), which tensor.sequence_parallel cuts. Nearest "
                  "data.seq_len: ",
                  nearest_multiples(seq_len, tp), ".");
}

nn::Region region(const TensorOptions& options, comm::Group& ranks) {
  comm::Group* group = &ranks;
  if (!options.sequence_parallel) {
    return {.enter =
                [group](const at::Tensor& x) {
                  return comm::identity_with_all_reduce(x, *group);
                },
            .leave =
                [group](const at::Tensor& x) {
                  return comm::all_reduce_with_identity(x, *group);
                }};
  }
  return {.enter =
              [group](const at::Tensor& x) {
                return comm::all_gather_with_reduce_scatter(x, kSequenceDim,
                                                            *group);
              },
          .leave =
              [group](const at::Tensor& x) {
                return comm::reduce_scatter_with_all_gather(x, kSequenceDim,
                                                            *group);
              }};
}

void apply(models::Decoder& decoder, const TensorOptions& options,
           comm::Group& group) {
  Cutter(options, group).cut(decoder);
}

}  // namespace tessera::parallel::tensor
