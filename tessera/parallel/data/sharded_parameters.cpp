#include "tessera/parallel/data/sharded_parameters.h"

#include <ATen/ATen.h>
#include <ATen/native/Resize.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/comm/flat_buffer.h"
#include "tessera/core/memory_kind.h"

namespace tessera::parallel::data {

using comm::FlatBuffer;
using mesh::Axis;
using mesh::Placement;

namespace {

void resize_storage(const at::Tensor& tensor, int64_t bytes) {
  at::native::resize_bytes_cpu(tensor.storage().unsafeGetStorageImpl(), bytes);
}

// An alias that autograd does not know as one: writing to it is no change that
// a recorded graph would refuse.
at::Tensor window_of(const at::Tensor& tensor) {
  return tensor.variable_data();
}

}  // namespace

// The parameters of a unit whose gradients are summed over the same ranks: they
// travel together.
class ShardedParameters::Group {
 public:
  Group(std::vector<nn::Parameter> parameters, const mesh::DeviceMesh& mesh,
        int64_t rank, int64_t stage, const ShardingOptions& options,
        comm::Group& shards, comm::Group& sum)
      : parameters_(std::move(parameters)),
        stage_(stage),
        bucket_bytes_(options.bucket_bytes),
        gradient_dtype_(options.gradient_dtype),
        shards_(shards),
        sum_(sum),
        sharded_(stage > 0 && shards.size() > 1) {
    const at::NoGradGuard no_grad;
    const mesh::Coord coord = mesh.coord_of(rank);
    for (const auto& parameter : parameters_) {
      const auto& layout = parameter.spec->layout;
      const Axis data = layout.data_axis();
      TORCH_INTERNAL_ASSERT(
          !sharded_ || layout.on(data) == Placement::shard(layout.data_dim()));
      full_shapes_.push_back(
          layout.with(data, Placement::replicate()).local_shape(mesh, coord));
    }
    if (sharded_) cut();
    lay_out_parameters();
    lay_out_gradients();
  }

  void add_to(std::vector<LocalParameter>& all) const {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      all.push_back({parameters_[i].name, parameters_[i].spec->layout,
                     local_[i], local_gradient_[i]});
    }
  }

  void gather() {
    if (!sharded_) return;
    const at::NoGradGuard no_grad;
    const MemoryScope scope(MemoryKind::kParameters);
    at::Tensor piece = piece_;
    if (stage_ == 3) {
      resize_storage(full_.flat(), full_bytes_);
    } else {
      piece = comm::zeros(shards_, {piece_numel_}, whole_[0].options());
      for (size_t i = 0; i < cuts_.size(); ++i) {
        in_piece(piece, i, shards_.rank()).copy_(local_[i]);
      }
    }
    const at::Tensor pieces =
        at::empty({shards_.size(), piece_numel_}, piece.options());
    shards_.all_gather(pieces, piece, comm::Mode::kBlocking);
    for (int64_t rank = 0; rank < shards_.size(); ++rank) {
      for (size_t i = 0; i < cuts_.size(); ++i) {
        rows_of(whole_[i], i, rank).copy_(in_piece(pieces[rank], i, rank));
      }
    }
  }

  void free() {
    if (sharded_ && stage_ == 3) resize_storage(full_.flat(), 0);
  }

  void zero_gradients() {
    gradients_are_whole() ? gradients_.flat().zero_() : piece_sum_.zero_();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].tensor.mutable_grad() = whole_gradient_[i];
    }
  }

  void begin_backward() {
    if (gradients_are_whole() || gradients_.flat().storage().nbytes() > 0) {
      return;
    }
    const MemoryScope scope(MemoryKind::kGradients);
    resize_storage(gradients_.flat(), gradient_bytes_);
    gradients_.flat().zero_();
  }

  void begin_reduction() {
    const at::NoGradGuard no_grad;
    if (!sharded_) {
      if (sum_.size() == 1) return;
      const at::Tensor flat = gradients_.flat();
      const int64_t most = std::max<int64_t>(
          1, bucket_bytes_ / static_cast<int64_t>(flat.itemsize()));
      for (int64_t begin = 0; begin < flat.numel(); begin += most) {
        works_.push_back(sum_.all_reduce(
            flat.narrow(0, begin, std::min(most, flat.numel() - begin))));
      }
      return;
    }
    packed_ = comm::zeros(shards_, {shards_.size(), piece_numel_},
                          gradients_.flat().options());
    for (int64_t rank = 0; rank < shards_.size(); ++rank) {
      for (size_t i = 0; i < cuts_.size(); ++i) {
        in_piece(packed_[rank], i, rank)
            .copy_(rows_of(whole_gradient_[i], i, rank));
      }
    }
    if (!gradients_are_whole()) resize_storage(gradients_.flat(), 0);
    reduced_ = at::empty({piece_numel_}, packed_.options());
    works_.push_back(shards_.reduce_scatter(reduced_, packed_));
  }

  void end_reduction() {
    const at::NoGradGuard no_grad;
    for (auto& work : std::exchange(works_, {})) work.wait();
    packed_ = at::Tensor();
    if (gradients_are_whole()) return;
    piece_sum_.add_(reduced_);
    reduced_ = at::Tensor();
  }

  // Over the ranks beside dp_shard, of what all micro-batches added up to.
  void begin_sum() {
    if (!sharded_ || sum_.size() == 1) return;
    works_.push_back(
        sum_.all_reduce(gradients_are_whole() ? reduced_ : piece_sum_));
  }

  void end_sum() {
    const at::NoGradGuard no_grad;
    for (auto& work : std::exchange(works_, {})) work.wait();
    if (!sharded_ || !gradients_are_whole()) return;
    for (size_t i = 0; i < cuts_.size(); ++i) {
      local_gradient_[i].copy_(in_piece(reduced_, i, shards_.rank()));
    }
    reduced_ = at::Tensor();
  }

 private:
  // How one parameter is cut, and where it lies in a piece of a collective.
  struct Cut {
    int64_t dim = 0;
    int64_t rows = 0;      // of the full parameter, along `dim`
    int64_t row_size = 0;  // elements
    int64_t offset = 0;    // in the piece
  };

  static int64_t bytes_of(const at::Tensor& tensor) {
    return static_cast<int64_t>(tensor.nbytes());
  }

  bool gradients_are_whole() const { return !sharded_ || stage_ == 1; }

  void cut() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      auto shape = full_shapes_[i];
      TORCH_INTERNAL_ASSERT(!shape.empty(), "a scalar cannot be sharded");
      const int64_t dim = parameters_[i].spec->layout.data_dim();
      const int64_t rows = std::exchange(shape[dim], 1);
      const int64_t row_size = c10::multiply_integers(shape);
      cuts_.push_back({dim, rows, row_size, piece_numel_});
      const int64_t most =
          mesh::chunk_of(rows, shards_.size(), 0).size() * row_size;
      piece_numel_ += (most + FlatBuffer::kAlignment - 1) /
                      FlatBuffer::kAlignment * FlatBuffer::kAlignment;
    }
  }

  // The rows of parameter `i` that belong to `rank` of the shard group.
  mesh::Range range_of(size_t i, int64_t rank) const {
    return mesh::chunk_of(cuts_[i].rows, shards_.size(), rank);
  }
  at::Tensor rows_of(const at::Tensor& full, size_t i, int64_t rank) const {
    const mesh::Range range = range_of(i, rank);
    return full.narrow(cuts_[i].dim, range.begin, range.size());
  }
  at::Tensor in_piece(const at::Tensor& piece, size_t i, int64_t rank) const {
    auto shape = full_shapes_[i];
    const int64_t rows = range_of(i, rank).size();
    shape[cuts_[i].dim] = rows;
    return piece.narrow(0, cuts_[i].offset, rows * cuts_[i].row_size)
        .view(shape);
  }

  void lay_out_parameters() {
    const MemoryScope scope(MemoryKind::kParameters);
    if (!sharded_) {
      for (const auto& parameter : parameters_) {
        local_.push_back(window_of(parameter.tensor));
      }
      return;
    }
    const auto options = parameters_[0].tensor.options().requires_grad(false);
    if (stage_ == 3) {
      piece_ = comm::zeros(shards_, {piece_numel_}, options);
      full_ = FlatBuffer(full_shapes_, options);
      full_bytes_ = bytes_of(full_.flat());
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      at::Tensor& parameter = parameters_[i].tensor;
      const at::Tensor filled = window_of(parameter);
      const at::Tensor full =
          stage_ == 3 ? full_.view(i) : at::empty(full_shapes_[i], options);
      whole_.push_back(window_of(full));
      local_.push_back(window_of(stage_ == 3
                                     ? in_piece(piece_, i, shards_.rank())
                                     : rows_of(full, i, shards_.rank())));
      local_.back().copy_(filled);
      parameter.set_data(full);
    }
    stage_ == 3 ? free() : gather();
  }

  void lay_out_gradients() {
    const MemoryScope scope(MemoryKind::kGradients);
    const at::Tensor& first = parameters_[0].tensor;
    const auto options =
        first.options().dtype(gradient_dtype_).requires_grad(false);
    // What is freed between steps is resized.
    gradients_ = FlatBuffer(full_shapes_, options, /*extra=*/0,
                            gradients_are_whole() ? &sum_ : nullptr);
    gradient_bytes_ = bytes_of(gradients_.flat());
    if (!gradients_are_whole()) piece_sum_ = at::zeros({piece_numel_}, options);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      whole_gradient_.push_back(gradients_.view(i));
      const at::Tensor& whole = whole_gradient_.back();
      parameters_[i].tensor.mutable_grad() = whole;
      local_gradient_.push_back(
          !sharded_               ? whole
          : gradients_are_whole() ? window_of(rows_of(whole, i, shards_.rank()))
                                  : in_piece(piece_sum_, i, shards_.rank()));
    }
    if (!gradients_are_whole()) resize_storage(gradients_.flat(), 0);
  }

  std::vector<nn::Parameter> parameters_;
  std::vector<std::vector<int64_t>> full_shapes_;
  const int64_t stage_;
  const int64_t bucket_bytes_;
  const at::ScalarType gradient_dtype_;
  comm::Group& shards_;  // along the data axis
  comm::Group& sum_;     // further ranks that share the gradient
  const bool sharded_;
  std::vector<Cut> cuts_;
  int64_t piece_numel_ = 0;
  std::vector<at::Tensor> local_;           // shards
  std::vector<at::Tensor> local_gradient_;  // of the shards
  std::vector<at::Tensor> whole_;           // where a gather writes
  at::Tensor piece_;  // of stage 3: all shards, this rank's part of a gather
  FlatBuffer full_;   // of stage 3: all parameters
  int64_t full_bytes_ = 0;
  FlatBuffer gradients_;  // whole, and a view of it for each parameter
  std::vector<at::Tensor> whole_gradient_;
  int64_t gradient_bytes_ = 0;
  at::Tensor piece_sum_;  // of stages 2 and 3: reduced so far
  std::vector<comm::Work> works_;
  at::Tensor packed_, reduced_;  // of the reduction under way
};

void set_layout(const nn::Parameter& parameter, int64_t stage) {
  const Placement own =
      stage == 0 ? Placement::replicate_summed()
                 : Placement::shard(parameter.spec->layout.data_dim());
  mesh::Layout& layout = parameter.spec->layout;
  layout = layout.with(layout.data_axis(), own);
  if (layout.is_of_expert()) return;
  layout = layout.with(Axis::kDpReplicate, Placement::replicate_summed())
               .with(Axis::kCp, Placement::replicate_summed());
}

ShardedParameters::ShardedParameters(
    std::vector<std::vector<nn::Parameter>> units, const mesh::DeviceMesh& mesh,
    comm::Communicator& ranks, const ShardingOptions& options)
    : stages_(options.stages) {
  const int64_t rank = ranks.rank();
  for (auto& unit : units) {
    std::map<std::vector<int64_t>, std::vector<nn::Parameter>> by_peers;
    for (auto& parameter : unit) {
      auto peers = parameter.spec->layout.gradient_peers(mesh, rank);
      by_peers[std::move(peers)].push_back(std::move(parameter));
    }
    const int64_t stage = stages_.at(units_.size());
    units_.emplace_back();
    for (auto& [peers, members] : by_peers) {
      const auto& layout = members.front().spec->layout;
      const Axis data = layout.data_axis();
      const std::string axes = peers.size() == 1       ? "self"
                               : layout.is_of_expert() ? mesh::name_of(data)
                                                       : mesh.axes_of(peers);
      units_.back().push_back(std::make_unique<Group>(
          std::move(members), mesh, rank, stage, options,
          *ranks.make_group(mesh.peers(rank, {data}), mesh::name_of(data)),
          *ranks.make_group(peers, axes)));
      units_.back().back()->add_to(parameters_);
    }
  }
}

ShardedParameters::~ShardedParameters() = default;

const std::vector<LocalParameter>& ShardedParameters::parameters() const {
  return parameters_;
}

void ShardedParameters::gather(int64_t unit) {
  for (auto& group : units_.at(unit)) group->gather();
}

void ShardedParameters::free(int64_t unit) {
  for (auto& group : units_.at(unit)) group->free();
}

void ShardedParameters::gather_all() {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (stages_[unit] < 3) gather(static_cast<int64_t>(unit));
  }
}

void ShardedParameters::zero_gradients() {
  for (auto& unit : units_) {
    for (auto& group : unit) group->zero_gradients();
  }
}

void ShardedParameters::begin_backward(int64_t unit) {
  for (auto& group : units_.at(unit)) group->begin_backward();
}

// Where gradients live as shards, one unit's reduction is under way at a time:
// more would hold what the shards are to save. Others are left alone: they may
// be with ranks that are still in the middle of their programs.
void ShardedParameters::reduce(int64_t unit) {
  const bool in_shards = stages_.at(unit) >= 2;
  if (in_shards) end(into_shards_);
  for (auto& group : units_.at(unit)) {
    group->begin_reduction();
    (in_shards ? into_shards_ : whole_).push_back(group.get());
  }
}

void ShardedParameters::end(std::vector<Group*>& pending) {
  for (Group* group : std::exchange(pending, {})) group->end_reduction();
}

// A sum may be over ranks that are still in the middle of their programs (a
// tied embedding's, over stages): all are begun before the first is awaited.
void ShardedParameters::await() {
  end(into_shards_);
  end(whole_);
  for (auto& unit : units_) {
    for (auto& group : unit) group->begin_sum();
  }
  for (auto& unit : units_) {
    for (auto& group : unit) group->end_sum();
  }
}

}  // namespace tessera::parallel::data
