#include "tessera/parallel/data/parameter_facts.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "tessera/models/hidden_matrix.h"
#include "tessera/parallel/data/bundle.h"

namespace tessera::parallel::data {
namespace {

using mesh::Axis;
using mesh::Placement;
using program::ParameterFacts;

// Units of the last stage read it too.
bool is_tied(const nn::ParameterSpec& spec) {
  return spec.units.size() > 1 && spec.units.front() == 0;
}

// Elements of parameters that travel alike.
struct Sizes {
  int64_t whole = 0, whole_aligned = 0, shard = 0;
  int64_t piece = 0;    // of a rank's part of a collective
  bool alone = false;   // each by itself, where it lies
  int64_t largest = 0;  // shard
  bool matrix = false;  // each is updated whole
  // Of those, in elements: what travels, and what the largest need meanwhile.
  int64_t sent = 0, gathered = 0;
  int64_t uncut = 0, products = 0;
  int64_t added_bytes = 0;  // while the most is added to masters
  int64_t flops = 0;        // of the products of all
  // One of them, for their types.
  const nn::ParameterSpec* spec = nullptr;
};

int64_t size_of(at::ScalarType type) {
  return static_cast<int64_t>(c10::elementSize(type));
}

bool rounds(const StateOptions& options) {
  return options.shard && *options.shard != options.compute;
}

Sizes sizes_of(const nn::ParameterSpec& spec, const mesh::DeviceMesh& mesh,
               const mesh::Coord& coord, int64_t stage) {
  const mesh::Layout& layout = spec.layout;
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
          .alone = alone,
          .largest = layout.local_box(mesh, coord).numel(),
          .spec = &spec};
}

// Half precision has fp32 masters, unless shards are masters.
bool keeps_masters(const StateOptions& options) {
  return !options.shard && c10::isReducedFloatingType(options.compute);
}

int64_t master_size(const StateOptions& options) {
  return keeps_masters(options)
             ? size_of(at::kFloat)
             : size_of(options.shard.value_or(options.compute));
}

// By which LibTorch transposes what is larger than this.
constexpr int64_t kTransposedBlock = int64_t{60} * 60;

// Of X X^T, A A and (b A + c A^2) X for X (m, n), m <= n (optim/muon.h).
int64_t orthogonal_flops(int64_t rows, int64_t columns, int64_t steps) {
  const int64_t m = std::min(rows, columns), n = std::max(rows, columns);
  return steps * (2 * m * n * m + 2 * m * m * m + 2 * m * m * n);
}

// A matrix (m, n) is there twice inside of its products, with a square of its
// shorter side; one of several experts beside all of them: its first products,
// which transpose it, are those of a part of these, with less beside. What is
// narrower than masters is there once more in their type while it is added.
void add_matrix(const mesh::Layout& layout, const mesh::DeviceMesh& mesh,
                const mesh::Coord& coord, const StateOptions& options,
                Sizes& sizes) {
  const auto pieces = pieces_of(layout, mesh, mesh.rank_at(coord));
  const auto& shape = pieces.shape;
  const int64_t rows = shape[shape.size() - 2], columns = shape.back();
  const int64_t shorter = std::min(rows, columns);
  sizes.matrix = true;
  if (pieces.is_cut()) {
    sizes.sent = pieces.numel;
    sizes.gathered = pieces.numel * std::ssize(pieces.ranks);
  } else {
    sizes.uncut = sizes.shard;
  }
  const bool is_stacked = shape.size() == 3;
  const bool transposes =
      !is_stacked && rows > columns && rows * columns >= kTransposedBlock;
  const int64_t all = c10::multiply_integers(shape);
  sizes.flops = (is_stacked ? shape.front() : 1) *
                orthogonal_flops(rows, columns, options.updates.steps);
  sizes.products = 2 * rows * columns + shorter * shorter +
                   (transposes ? kTransposedBlock : 0) + (is_stacked ? all : 0);
  const int64_t item = size_of(options.updates.dtype);
  const int64_t master = master_size(options);
  sizes.added_bytes = all * item + (item < master ? sizes.shard * master : 0);
}

// Of what is made of a gradient and a moment, and then of products.
void set_update_bytes(ParameterFacts& facts, const Sizes& sizes,
                      const StateOptions& options) {
  const int64_t item = size_of(options.updates.dtype);
  const int64_t master = master_size(options);
  const bool widens = size_of(options.gradient) < master;
  const bool narrow =
      options.kept.dtype && size_of(*options.kept.dtype) != master;
  const int64_t each = master * (1 + (widens ? 1 : 0) + (narrow ? 1 : 0)) +
                       (item < master ? item : 0);
  facts.update_piece_bytes = sizes.sent * item;
  facts.update_gathered_bytes = sizes.gathered * item;
  facts.update_flops = sizes.flops;
  facts.piece_work_bytes = sizes.largest * each;
  facts.update_work_bytes =
      std::max({sizes.uncut * each, sizes.products * item, sizes.added_bytes});
}

// Over which a gradient is summed beside what a reduce_scatter does; an axis
// that counts for a part of its ranks too.
std::vector<Axis> sum_axes_of(const nn::ParameterSpec& spec,
                              const mesh::DeviceMesh& mesh, bool two_replicas) {
  std::vector<Axis> axes;
  if ((is_tied(spec) || two_replicas) && mesh.degree(Axis::kPp) > 1) {
    axes.push_back(Axis::kPp);
  }
  const auto add = [&](Axis axis) {
    if (mesh.degree(axis) > 1 && spec.layout.on(axis).summed) {
      axes.push_back(axis);
    }
  };
  for (Axis axis : mesh::kAxes) {
    if (axis != Axis::kPp) add(axis);
  }
  for (Axis axis : mesh::kExpertAxes) {
    if (axis != Axis::kPp) add(axis);
  }
  return axes;
}

// Whole parameters; of stage 3 shards alone; of each version, none of which is
// rounded. What is rounded lies apart from its shards.
int64_t parameter_bytes(const Sizes& sizes, int64_t stage,
                        const StateOptions& options) {
  const int64_t whole = sizes.alone ? sizes.whole_aligned : sizes.whole;
  const int64_t read = whole * size_of(options.compute);
  const int64_t updated = (stage == 0 ? whole : sizes.piece) *
                          size_of(options.shard.value_or(options.compute));
  const int64_t versions = options.versions.parameters;
  if (stage == 3) return versions * updated;
  return versions * read + (rounds(options) ? updated : 0);
}

// What travels, beside what it becomes.
int64_t gather_work_bytes(const Sizes& sizes, int64_t stage, int64_t ranks,
                          const StateOptions& options) {
  if (ranks == 1) return 0;
  const bool shard_is_sent =
      !rounds(options) && !options.crosses && (sizes.alone || stage == 3);
  const int64_t sent = shard_is_sent ? 0 : sizes.piece;
  const int64_t received = sizes.alone ? 0 : ranks * sizes.piece;
  return (sent + received) * size_of(options.compute);
}

void set_bytes(ParameterFacts& facts, const Sizes& sizes, int64_t ranks,
               const StateOptions& of_model) {
  StateOptions options = of_model;
  options.compute = sizes.spec->type_in(options.compute);
  options.gradient = sizes.spec->type_in(options.gradient);
  const int64_t weight = size_of(options.compute);
  const int64_t gradient = size_of(options.gradient);
  const int64_t stage = facts.zero_stage;
  facts.elements = sizes.whole;
  facts.shard_elements = sizes.shard;
  facts.parameter_bytes = parameter_bytes(sizes, stage, options);
  facts.gradient_bytes = (stage >= 2 ? sizes.piece : sizes.whole_aligned) *
                         gradient * options.versions.gradients;
  const bool half = keeps_masters(options);
  const int64_t master = master_size(options);
  const int64_t moments =
      sizes.matrix ? options.kept.matrix_moments : options.kept.moments;
  const int64_t masters = (half ? 1 : 0) + (options.kept.average ? 1 : 0);
  const int64_t moment =
      options.kept.dtype ? size_of(*options.kept.dtype) : master;
  facts.optimizer_bytes = sizes.shard * (master * masters + moment * moments);
  facts.read_bytes = sizes.whole * weight;
  facts.shard_gradient_bytes = sizes.shard * gradient;
  facts.updated_bytes =
      facts.shard_gradient_bytes + facts.optimizer_bytes +
      sizes.shard * size_of(options.shard.value_or(options.compute));
  if (sizes.matrix) {
    set_update_bytes(facts, sizes, options);
  } else if (moment != master) {  // copies of them in the master's type
    facts.update_work_bytes = sizes.largest * master * moments;
  }
  const bool sums = !facts.sum_axes.empty();
  if (stage == 0) {
    if (sums) facts.sum_message_bytes = sizes.whole_aligned * gradient;
    return;
  }
  if (sums) facts.sum_message_bytes = sizes.piece * gradient;
  const bool travels = ranks > 1;
  const int64_t all = travels ? ranks * sizes.piece : 0;
  facts.gather_message_bytes = all * weight;
  facts.gather_work_bytes = gather_work_bytes(sizes, stage, ranks, options);
  facts.reduce_message_bytes = all * gradient;
  if (stage >= 2) facts.whole_gradient_bytes = sizes.whole_aligned * gradient;
  if (!travels) {
    facts.reduce_work_bytes = facts.whole_gradient_bytes;
  } else if (sizes.alone) {  // whole gradients stay until they are reduced
    facts.reduce_work_bytes =
        facts.whole_gradient_bytes + sizes.piece * gradient;
  } else {
    facts.reduce_work_bytes = (all + sizes.piece) * gradient;
    facts.pack_bytes = all * gradient;
  }
  if (stage == 3) facts.gathered_bytes = sizes.whole_aligned * weight;
}

// They are gathered, and neither reduced nor updated: there is one version.
void without_gradients(ParameterFacts& facts, const StateOptions& options) {
  facts.parameter_bytes /= options.versions.parameters;
  facts.sum_axes.clear();
  facts.gradient_bytes = facts.optimizer_bytes = 0;
  facts.shard_gradient_bytes = facts.updated_bytes = facts.update_flops = 0;
  facts.whole_gradient_bytes = 0;
  facts.reduce_message_bytes = facts.sum_message_bytes = 0;
  facts.reduce_work_bytes = facts.pack_bytes = 0;
  facts.update_piece_bytes = facts.update_gathered_bytes = 0;
  facts.piece_work_bytes = facts.update_work_bytes = 0;
}

}  // namespace

std::vector<ParameterFacts> parameter_facts(
    const std::vector<const nn::ParameterSpec*>& parameters,
    const mesh::DeviceMesh& mesh, const mesh::Coord& coord,
    const StateOptions& options) {
  // By what they are summed over: key/value heads that several ranks hold are
  // summed over some ranks of tp, norms over all.
  using Key =
      std::tuple<std::vector<Axis>, int64_t, bool, bool, bool, bool, bool>;
  std::map<Key, Sizes> groups;
  const bool is_narrow = c10::isReducedFloatingType(options.compute) ||
                         c10::isReducedFloatingType(options.gradient);
  for (const auto* spec : parameters) {
    Sizes sizes = sizes_of(*spec, mesh, coord, options.zero_stage);
    if (options.updates.whole_matrices &&
        models::is_hidden_matrix(*spec, options.num_units)) {
      add_matrix(spec->layout, mesh, coord, options, sizes);
    }
    Sizes& sum = groups[{sum_axes_of(*spec, mesh, options.two_replicas),
                         spec->layout.on(Axis::kTp).copies, is_tied(*spec),
                         spec->is_frozen, is_narrow && spec->balances_load,
                         sizes.alone, sizes.matrix}];
    sum.spec = spec;
    sum.alone = sizes.alone;
    sum.matrix = sizes.matrix;
    sum.sent += sizes.sent;
    sum.gathered += sizes.gathered;
    sum.uncut = std::max(sum.uncut, sizes.uncut);
    sum.largest = std::max(sum.largest, sizes.largest);
    sum.products = std::max(sum.products, sizes.products);
    sum.added_bytes = std::max(sum.added_bytes, sizes.added_bytes);
    sum.flops += sizes.flops;
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
    if (std::get<3>(key)) without_gradients(each, options);
  }
  return facts;
}

}  // namespace tessera::parallel::data
