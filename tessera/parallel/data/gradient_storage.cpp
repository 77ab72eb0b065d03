#include "tessera/parallel/data/gradient_storage.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "tessera/comm/flat_buffer.h"
#include "tessera/core/memory_kind.h"
#include "tessera/parallel/data/parameter_storage.h"

namespace tessera::parallel::data {
namespace {

// Whole gradients of a bundle, flat, as autograd adds to them.
class Whole {
 public:
  // `group`: see FlatBuffer.
  Whole(const Bundle& bundle, at::ScalarType dtype, comm::Group* group)
      : bundle_(bundle),
        flat_(bundle.cut.full_shapes(),
              bundle.parameters[0].tensor.options().dtype(dtype).requires_grad(
                  false),
              /*extra=*/0, group) {
    for (size_t i = 0; i < bundle.parameters.size(); ++i) {
      views_.push_back(flat_.view(i));
    }
    attach();
  }
  // A step may have left .grad cleared.
  void attach() {
    for (size_t i = 0; i < views_.size(); ++i) {
      at::Tensor parameter = bundle_.parameters[i].tensor;
      parameter.mutable_grad() = views_[i];
    }
  }
  const at::Tensor& flat() const { return flat_.flat(); }
  const at::Tensor& view(size_t i) const { return views_[i]; }

 private:
  const Bundle& bundle_;
  comm::FlatBuffer flat_;
  std::vector<at::Tensor> views_;
};

class ReplicatedGradients final : public GradientStorage {
 public:
  ReplicatedGradients(const Bundle& bundle, const GradientOptions& options,
                      comm::Group& peers)
      : peers_(peers),
        bucket_bytes_(options.bucket_bytes),
        whole_(bundle, options.dtype, &peers) {
    for (size_t i = 0; i < bundle.parameters.size(); ++i) {
      local_.push_back(whole_.view(i));
    }
  }

  void zero() override {
    whole_.flat().zero_();
    whole_.attach();
  }
  void allocate() override {}

  void begin_reduction(comm::Mode mode) override {
    if (peers_.size() == 1) return;
    const at::Tensor& flat = whole_.flat();
    const int64_t most = elements_of_bucket(
        bucket_bytes_, flat.numel(), static_cast<int64_t>(flat.itemsize()));
    for (int64_t begin = 0; begin < flat.numel(); begin += most) {
      works_.push_back(peers_.all_reduce(
          flat.narrow(0, begin, std::min(most, flat.numel() - begin)),
          comm::ReduceOp::kSum, mode));
    }
  }
  void await_reduction() override {
    for (auto& work : std::exchange(works_, {})) work.wait();
  }
  void begin_sum(comm::Mode /*mode*/) override {}
  void await_sum() override {}

 private:
  comm::Group& peers_;
  const int64_t bucket_bytes_;
  Whole whole_;
  std::vector<comm::Work> works_;
};

class ScatteredGradients final : public GradientStorage {
 public:
  ScatteredGradients(const Bundle& bundle, const GradientOptions& options,
                     comm::Group& shards, comm::Group& peers)
      : bundle_(bundle),
        shards_(shards),
        peers_(peers),
        // What is freed between steps is resized.
        whole_(bundle, options.dtype, stays() ? &peers : nullptr),
        whole_bytes_(static_cast<int64_t>(whole_.flat().nbytes())) {
    const Cut& cut = bundle.cut;
    if (!stays()) {
      sum_ = at::zeros({cut.numel()}, whole_.flat().options());
    }
    for (size_t i = 0; i < cut.count(); ++i) {
      local_.push_back(
          stays() ? window_of(cut.rows_of(whole_.view(i), i, shards.rank()))
                  : cut.in_piece(sum_, i, shards.rank()));
    }
    if (!stays()) resize_storage(whole_.flat(), 0);
  }

  void zero() override {
    stays() ? whole_.flat().zero_() : sum_.zero_();
    whole_.attach();
  }

  void allocate() override {
    if (stays()) return;
    const MemoryScope scope(MemoryKind::kGradients);
    resize_storage(whole_.flat(), whole_bytes_);
    whole_.flat().zero_();
  }

  void begin_reduction(comm::Mode mode) override {
    const at::NoGradGuard no_grad;
    const Cut& cut = bundle_.cut;
    packed_ = comm::zeros(shards_, {shards_.size(), cut.numel()},
                          whole_.flat().options());
    for (int64_t rank = 0; rank < shards_.size(); ++rank) {
      for (size_t i = 0; i < cut.count(); ++i) {
        cut.in_piece(packed_[rank], i, rank)
            .copy_(cut.rows_of(whole_.view(i), i, rank));
      }
    }
    if (!stays()) resize_storage(whole_.flat(), 0);
    reduced_ = at::empty({cut.numel()}, packed_.options());
    work_ =
        shards_.reduce_scatter(reduced_, packed_, comm::ReduceOp::kSum, mode);
  }

  void await_reduction() override {
    const at::NoGradGuard no_grad;
    std::exchange(work_, {}).wait();
    packed_ = at::Tensor();
    if (!stays()) {
      sum_.add_(reduced_);
      reduced_ = at::Tensor();
    } else if (!bundle_.is_summed()) {
      take_reduced();
    }
  }

  // Of what all micro-batches added up to.
  void begin_sum(comm::Mode mode) override {
    if (!bundle_.is_summed()) return;
    work_ = peers_.all_reduce(stays() ? reduced_ : sum_, comm::ReduceOp::kSum,
                              mode);
  }

  void await_sum() override {
    if (!bundle_.is_summed()) return;
    const at::NoGradGuard no_grad;
    std::exchange(work_, {}).wait();
    if (stays()) take_reduced();
  }

 private:
  // Whole gradients, all the time: stage 1.
  bool stays() const { return bundle_.gradients_are_whole(); }

  void take_reduced() {
    for (size_t i = 0; i < local_.size(); ++i) {
      local_[i].copy_(bundle_.cut.in_piece(reduced_, i, shards_.rank()));
    }
    reduced_ = at::Tensor();
  }

  const Bundle& bundle_;
  comm::Group& shards_;
  comm::Group& peers_;
  Whole whole_;
  const int64_t whole_bytes_;
  at::Tensor sum_;  // of stages 2 and 3: this rank's piece, reduced so far
  at::Tensor packed_, reduced_;  // of the reduction under way
  comm::Work work_;
};

}  // namespace

int64_t elements_of_bucket(int64_t bytes, int64_t all, int64_t item) {
  return bytes == 0 ? all : std::max<int64_t>(1, bytes / item);
}

std::unique_ptr<GradientStorage> make_gradients(const Bundle& bundle,
                                                const GradientOptions& options,
                                                comm::Group& shards,
                                                comm::Group& peers) {
  const at::NoGradGuard no_grad;
  const MemoryScope scope(MemoryKind::kGradients);
  if (bundle.is_sharded()) {
    return std::make_unique<ScatteredGradients>(bundle, options, shards, peers);
  }
  return std::make_unique<ReplicatedGradients>(bundle, options, peers);
}

}  // namespace tessera::parallel::data
