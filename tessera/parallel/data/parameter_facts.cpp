#include "tessera/parallel/data/parameter_facts.h"

#include <c10/util/accumulate.h>

#include <map>
#include <tuple>

#include "tessera/parallel/data/bundle.h"

namespace tessera::parallel::data {
namespace {

using mesh::Axis;
using mesh::Placement;
using program::ParameterFacts;

bool is_tied(const nn::ParameterSpec& spec) { return spec.units.size() > 1; }

// Elements of parameters that travel alike.
struct Sizes {
  int64_t whole = 0, whole_aligned = 0, shard = 0;
  int64_t piece = 0;   // of a rank's part of a collective
  bool alone = false;  // each by itself, where it lies
};

Sizes sizes_of(const mesh::Layout& layout, const mesh::DeviceMesh& mesh,
               const mesh::Coord& coord, int64_t stage) {
  const Axis data = layout.data_axis();
  const auto shape =
      layout.with(data, Placement::replicate()).local_shape(mesh, coord);
  const int64_t dim = layout.data_dim();
  const Cut cut({shape}, {dim}, stage > 0 ? mesh.degree(data) : 1);
  const bool alone = travels_alone(cut);
  return {.whole = c10::multiply_integers(shape),
          .whole_aligned = alone ? cut.ranks() * cut.numel()
                                 : Cut({shape}, {dim}, /*ranks=*/1).numel(),
          .shard = layout.local_box(mesh, coord).numel(),
          .piece = cut.numel(),
          .alone = alone};
}

// Over which a gradient is summed beside what a reduce_scatter does; an axis
// that counts for a part of its ranks too.
std::vector<Axis> sum_axes_of(const nn::ParameterSpec& spec,
                              const mesh::DeviceMesh& mesh) {
  std::vector<Axis> axes;
  if (is_tied(spec) && mesh.degree(Axis::kPp) > 1) axes.push_back(Axis::kPp);
  const auto add = [&](Axis axis) {
    if (mesh.degree(axis) > 1 && spec.layout.on(axis).summed) {
      axes.push_back(axis);
    }
  };
  for (Axis axis : mesh::kAxes) {
    if (axis != Axis::kPp) add(axis);
  }
  add(Axis::kExpertDp);
  return axes;
}

void set_bytes(ParameterFacts& facts, const Sizes& sizes, int64_t ranks,
               const StateOptions& options) {
  const auto size = [](at::ScalarType type) {
    return static_cast<int64_t>(c10::elementSize(type));
  };
  const int64_t weight = size(options.compute);
  const int64_t gradient = size(options.gradient);
  const int64_t stage = facts.zero_stage;
  facts.elements = sizes.whole;
  facts.shard_elements = sizes.shard;
  const int64_t whole = sizes.alone ? sizes.whole_aligned : sizes.whole;
  facts.parameter_bytes = (stage == 3 ? sizes.piece : whole) * weight;
  facts.gradient_bytes =
      (stage >= 2 ? sizes.piece : sizes.whole_aligned) * gradient;
  // Half precision has fp32 masters.
  const bool half = c10::isReducedFloatingType(options.compute);
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
  if (stage >= 2) facts.whole_gradient_bytes = sizes.whole_aligned * gradient;
  if (sizes.alone) {  // whole gradients stay until they are reduced
    facts.reduce_work_bytes =
        facts.whole_gradient_bytes + sizes.piece * gradient;
  } else {
    facts.gather_work_bytes = (all + (stage == 3 ? 0 : sizes.piece)) * weight;
    facts.reduce_work_bytes = (all + sizes.piece) * gradient;
    facts.pack_bytes = all * gradient;
  }
  if (stage == 3) facts.gathered_bytes = sizes.whole_aligned * weight;
}

// They are gathered, and neither reduced nor updated.
void without_gradients(ParameterFacts& facts) {
  facts.sum_axes.clear();
  facts.gradient_bytes = facts.optimizer_bytes = 0;
  facts.whole_gradient_bytes = 0;
  facts.reduce_message_bytes = facts.sum_message_bytes = 0;
  facts.reduce_work_bytes = facts.pack_bytes = 0;
}

}  // namespace

std::vector<ParameterFacts> parameter_facts(
    const std::vector<const nn::ParameterSpec*>& parameters,
    const mesh::DeviceMesh& mesh, const mesh::Coord& coord,
    const StateOptions& options) {
  // By what they are summed over: key/value heads that several ranks hold are
  // summed over some ranks of tp, norms over all.
  using Key = std::tuple<std::vector<Axis>, int64_t, bool, bool, bool>;
  std::map<Key, Sizes> groups;
  for (const auto* spec : parameters) {
    const Sizes sizes = sizes_of(spec->layout, mesh, coord, options.zero_stage);
    Sizes& sum =
        groups[{sum_axes_of(*spec, mesh), spec->layout.on(Axis::kTp).copies,
                is_tied(*spec), spec->is_frozen, sizes.alone}];
    sum.alone = sizes.alone;
    sum.whole += sizes.whole;
    sum.whole_aligned += sizes.whole_aligned;
    sum.shard += sizes.shard;
    sum.piece += sizes.piece;
  }
  std::vector<ParameterFacts> facts;
  for (const auto& [key, sizes] : groups) {
    const auto& layout = parameters.front()->layout;
    ParameterFacts& each = facts.emplace_back();
    each.data_axis = layout.data_axis();
    each.sum_axes = std::get<0>(key);
    each.tied = std::get<2>(key);
    each.zero_stage = options.zero_stage;
    const int64_t ranks = mesh.degree(each.data_axis);
    set_bytes(each, sizes, ranks, options);
    if (std::get<3>(key)) without_gradients(each);
  }
  return facts;
}

}  // namespace tessera::parallel::data
