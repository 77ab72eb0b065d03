#include "tessera/models/detail/parameter_facts.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/core/alignment.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

using mesh::Axis;
using mesh::Layout;
using mesh::Placement;

// Lists a unit's parameters in the order of declaration, as the strategies
// place them (compose.cpp).
class Placer {
 public:
  Placer(const ModelConfig& model, const mesh::DeviceMesh& mesh,
         const FactsOptions& options)
      : model_(model),
        family_(family_named(model.family)),
        mesh_(mesh),
        options_(options) {}

  std::vector<PlacedParameter> take() { return std::move(all_); }

  void embedding() {
    add("tokens.weight", {model_.vocab, model_.hidden}, Placement::shard(0));
    all_.back().tied = model_.tie_embeddings;
    if (!family_.learned_positions) return;
    add("positions.weight", {model_.max_seq, model_.hidden}, whole());
  }

  void block(bool has_experts) {
    norm("attention_norm");
    const int64_t width = model_.hidden;
    const int64_t q = model_.heads * model_.head_dim;
    const int64_t kv = model_.kv_heads * model_.head_dim;
    const int64_t copies = std::max<int64_t>(1, tp() / model_.kv_heads);
    columns("attention.q", width, q, family_.qkv_bias);
    columns("attention.k", width, kv, family_.qkv_bias, copies);
    columns("attention.v", width, kv, family_.qkv_bias, copies);
    rows("attention.o", q, width, family_.out_bias);
    if (family_.qk_norm) {
      for (const char* name : {"attention.q_norm", "attention.k_norm"}) {
        add(std::string(name) + ".weight", {model_.head_dim},
            Placement::replicate_summed());
      }
    }
    norm("mlp_norm");
    if (has_experts) {
      add("moe.gate.weight", {model_.moe.experts, width},
          Placement::replicate_summed());
      return;
    }
    const bool bias = family_.mlp_bias;
    if (gated()) columns("mlp.gate", width, model_.ffn, bias);
    columns("mlp.up", width, model_.ffn, bias);
    rows("mlp.down", model_.ffn, width, bias);
  }

  void experts() {
    const int64_t width = model_.hidden, ffn = model_.ffn;
    if (gated()) expert("gate", {ffn, width}, 0);
    expert("up", {ffn, width}, 0);
    expert("down", {width, ffn}, 1);
  }

  void head() {
    norm("final_norm");
    if (model_.tie_embeddings) return;
    columns("head", model_.hidden, model_.vocab, /*bias=*/false);
  }

 private:
  int64_t tp() const { return mesh_.degree(Axis::kTp); }
  bool gated() const { return family_.mlp == nn::MlpKind::kSwiGlu; }
  Placement whole() const {
    return options_.sequence_parallel ? Placement::replicate_summed()
                                      : Placement::replicate();
  }

  void add(const std::string& name, std::vector<int64_t> shape,
           const Placement& on_tp) {
    Layout layout(std::move(shape));
    if (tp() > 1) layout = layout.with(Axis::kTp, on_tp);
    layout = layout.with(Axis::kDpReplicate, Placement::replicate_summed())
                 .with(Axis::kCp, Placement::replicate_summed())
                 .with(Axis::kDpShard, data(options_.zero_stage));
    all_.push_back({.name = name, .layout = std::move(layout)});
  }
  static Placement data(int64_t stage, int64_t dim = 0) {
    return stage == 0 ? Placement::replicate_summed() : Placement::shard(dim);
  }
  void columns(const std::string& name, int64_t in, int64_t out, bool bias,
               int64_t copies = 1) {
    add(name + ".weight", {out, in}, Placement::shard(0, copies));
    if (bias) add(name + ".bias", {out}, Placement::shard(0, copies));
  }
  void rows(const std::string& name, int64_t in, int64_t out, bool bias) {
    add(name + ".weight", {out, in}, Placement::shard(1));
    if (bias) add(name + ".bias", {out}, whole());
  }
  void norm(const std::string& name) {
    add(name + ".weight", {model_.hidden}, whole());
    if (family_.norm == nn::NormKind::kLayerNorm) {
      add(name + ".bias", {model_.hidden}, whole());
    }
  }
  // Stacked: each coord of ep holds its own of them.
  void expert(const std::string& name, std::vector<int64_t> shape,
              int64_t cut_dim) {
    shape.insert(shape.begin(), model_.moe.experts);
    Layout layout = Layout(std::move(shape), mesh::View::kExperts)
                        .with(Axis::kEp, Placement::shard(0));
    if (mesh_.degree(Axis::kEtp) > 1) {
      layout = layout.with(Axis::kEtp, Placement::shard(cut_dim + 1));
    }
    layout = layout.with(Axis::kExpertDp, data(options_.expert_zero_stage,
                                               layout.data_dim()));
    all_.push_back({.name = name + ".weight", .layout = std::move(layout)});
  }

  const ModelConfig& model_;
  const Family& family_;
  const mesh::DeviceMesh& mesh_;
  const FactsOptions& options_;
  std::vector<PlacedParameter> all_;
};

}  // namespace

std::vector<PlacedParameter> parameters_of_unit(UnitKind kind,
                                                const ModelConfig& model,
                                                const mesh::DeviceMesh& mesh,
                                                const FactsOptions& options) {
  Placer placer(model, mesh, options);
  switch (kind) {
    case UnitKind::kEmbedding:
      placer.embedding();
      break;
    case UnitKind::kBlock:
    case UnitKind::kGatedBlock:
      placer.block(kind == UnitKind::kGatedBlock);
      break;
    case UnitKind::kExperts:
      placer.experts();
      break;
    case UnitKind::kHead:
      placer.head();
      break;
  }
  return placer.take();
}

}  // namespace tessera::models

namespace tessera::models::detail {
namespace {

using mesh::Axis;
using mesh::Placement;
using program::ParameterFacts;

int64_t product_of(const std::vector<int64_t>& sizes) {
  int64_t product = 1;
  for (int64_t size : sizes) product *= size;
  return product;
}

int64_t aligned(int64_t numel) {
  return (numel + kFlatAlignment - 1) / kFlatAlignment * kFlatAlignment;
}

// Elements of parameters that travel together.
struct Sizes {
  int64_t whole = 0, whole_aligned = 0, shard = 0;
  int64_t piece = 0;  // of a rank's part of a collective
};

Sizes sizes_of(const PlacedParameter& parameter, const mesh::DeviceMesh& mesh,
               const mesh::Coord& coord) {
  const auto& layout = parameter.layout;
  const Axis data = layout.data_axis();
  const auto shape =
      layout.with(data, Placement::replicate()).local_shape(mesh, coord);
  const int64_t whole = product_of(shape);
  const int64_t rows = shape[layout.data_dim()], n = mesh.degree(data);
  const int64_t most =
      rows == 0 ? 0 : mesh::chunk_of(rows, n, 0).size() * (whole / rows);
  return {.whole = whole,
          .whole_aligned = aligned(whole),
          .shard = layout.local_box(mesh, coord).numel(),
          .piece = aligned(most)};
}

// Over which a gradient is summed beside what a reduce_scatter does; an axis
// that counts for a part of its ranks too.
std::vector<Axis> sum_axes_of(const PlacedParameter& parameter,
                              const mesh::DeviceMesh& mesh) {
  std::vector<Axis> axes;
  if (parameter.tied && mesh.degree(Axis::kPp) > 1) axes.push_back(Axis::kPp);
  for (Axis axis : {Axis::kDpReplicate, Axis::kDpShard, Axis::kCp, Axis::kTp,
                    Axis::kExpertDp}) {
    if (mesh.degree(axis) > 1 && parameter.layout.on(axis).summed) {
      axes.push_back(axis);
    }
  }
  return axes;
}

void set_bytes(ParameterFacts& facts, const Sizes& sizes, int64_t ranks,
               const FactsOptions& options) {
  const auto size = [](at::ScalarType type) {
    return static_cast<int64_t>(c10::elementSize(type));
  };
  const int64_t weight = size(options.compute);
  const int64_t gradient = size(options.gradient);
  const int64_t stage = facts.zero_stage;
  facts.elements = sizes.whole;
  facts.shard_elements = sizes.shard;
  facts.parameter_bytes = (stage == 3 ? sizes.piece : sizes.whole) * weight;
  facts.gradient_bytes =
      (stage >= 2 ? sizes.piece : sizes.whole_aligned) * gradient;
  // Half precision has fp32 masters.
  const bool half = options.compute == at::kBFloat16;
  facts.optimizer_bytes = sizes.shard * (half ? size(at::kFloat) : weight) *
                          (options.moments + (half ? 1 : 0));
  const bool sums = !facts.sum_axes.empty();
  if (stage == 0) {
    if (sums) facts.sum_message_bytes = sizes.whole_aligned * gradient;
    return;
  }
  if (sums) facts.sum_message_bytes = sizes.piece * gradient;
  const int64_t all = ranks * sizes.piece;
  facts.gather_message_bytes = all * weight;
  facts.reduce_message_bytes = all * gradient;
  facts.gather_work_bytes = (all + (stage == 3 ? 0 : sizes.piece)) * weight;
  facts.reduce_work_bytes = (all + sizes.piece) * gradient;
  if (stage >= 2) facts.whole_gradient_bytes = sizes.whole_aligned * gradient;
  if (stage == 3) facts.gathered_bytes = sizes.whole_aligned * weight;
}

}  // namespace

std::vector<ParameterFacts> parameter_facts(
    const std::vector<PlacedParameter>& parameters,
    const mesh::DeviceMesh& mesh, const mesh::Coord& coord,
    const FactsOptions& options) {
  // By what they are summed over: key/value heads that several ranks hold are
  // summed over some ranks of tp, norms over all.
  using Key = std::tuple<std::vector<Axis>, int64_t, bool>;
  std::map<Key, Sizes> groups;
  for (const auto& parameter : parameters) {
    const Sizes sizes = sizes_of(parameter, mesh, coord);
    Sizes& sum =
        groups[{sum_axes_of(parameter, mesh),
                parameter.layout.on(Axis::kTp).copies, parameter.tied}];
    sum.whole += sizes.whole;
    sum.whole_aligned += sizes.whole_aligned;
    sum.shard += sizes.shard;
    sum.piece += sizes.piece;
  }
  std::vector<ParameterFacts> facts;
  for (const auto& [key, sizes] : groups) {
    const auto& layout = parameters.front().layout;
    ParameterFacts& each = facts.emplace_back();
    each.data_axis = layout.data_axis();
    each.sum_axes = std::get<0>(key);
    each.tied = std::get<2>(key);
    const int64_t ranks = mesh.degree(each.data_axis);
    each.zero_stage = ranks == 1              ? 0
                      : layout.is_of_expert() ? options.expert_zero_stage
                                              : options.zero_stage;
    set_bytes(each, sizes, ranks, options);
  }
  return facts;
}

}  // namespace tessera::models::detail
