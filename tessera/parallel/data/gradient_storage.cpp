#include "tessera/parallel/data/gradient_storage.h"

#include <ATen/ATen.h>

#include <utility>

#include "tessera/comm/flat_gradients.h"
#include "tessera/core/memory_kind.h"
#include "tessera/parallel/data/parameter_storage.h"

namespace tessera::parallel::data {
namespace {

std::vector<at::Tensor> parameters_of(const Bundle& bundle) {
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : bundle.parameters) {
    parameters.push_back(parameter.tensor);
  }
  return parameters;
}

at::ScalarType type_of(const Bundle& bundle, const GradientOptions& options) {
  return bundle.type_in(options.dtype.value_or(bundle.dtype));
}

class ReplicatedGradients final : public GradientStorage {
 public:
  ReplicatedGradients(const Bundle& bundle, const GradientOptions& options,
                      comm::Group& peers)
      : peers_(peers),
        bucket_bytes_(options.bucket_bytes),
        whole_(parameters_of(bundle), type_of(bundle, options), /*extra=*/0,
               &peers) {
    for (size_t i = 0; i < bundle.parameters.size(); ++i) {
      local_.push_back(whole_.view(i));
    }
    if (options.may_be_unwritten) {
      unwritten_.emplace(parameters_of(bundle), local_, options.batches);
    }
  }

  void use() override { whole_.attach(); }
  void zero() override {
    use();
    zero_or_leave(whole_.flat());
  }
  void allocate() override {}

  void begin_reduction(comm::Mode mode) override {
    complete();
    if (peers_.size() == 1) return;
    whole_.begin_all_reduce(peers_, mode, bucket_bytes_);
  }
  void await_reduction() override { whole_.await_all_reduce(); }
  void begin_sum(comm::Mode /*mode*/) override {}
  void await_sum() override {}

 private:
  comm::Group& peers_;
  const int64_t bucket_bytes_;
  comm::FlatGradients whole_;
};

class ScatteredGradients final : public GradientStorage {
 public:
  ScatteredGradients(const Bundle& bundle, const GradientOptions& options,
                     comm::Group& shards, comm::Group& peers)
      : bundle_(bundle),
        shards_(shards),
        peers_(peers),
        direct_(travels_alone(bundle.cut)),
        // What is freed between steps is resized.
        whole_(parameters_of(bundle), type_of(bundle, options), extra(),
               stays() || direct_ ? &shards : nullptr),
        whole_bytes_(static_cast<int64_t>(whole_.flat().nbytes())) {
    const Cut& cut = bundle.cut;
    for (size_t i = 0; i < cut.count(); ++i) views_.push_back(whole_.view(i));
    if (!stays()) {
      const MemoryScope scope(MemoryKind::kGradients);
      sum_ = at::zeros({cut.numel()}, whole_.flat().options());
    }
    for (size_t i = 0; i < cut.count(); ++i) {
      local_.push_back(
          stays() ? window_of(cut.rows_of(whole_.view(i), i, shards.rank()))
                  : cut.in_piece(sum_, i, shards.rank()));
    }
    if (!stays()) resize_storage(whole_.flat(), 0);
    if (options.may_be_unwritten) {
      unwritten_.emplace(parameters_of(bundle), views_,
                         stays() ? options.batches : 1);
    }
  }

  // The memory may be away meanwhile.
  void use() override {
    for (size_t i = 0; i < views_.size(); ++i) {
      at::Tensor parameter = bundle_.parameters[i].tensor;
      if (!whole_.is_in_place(i)) parameter.mutable_grad() = views_[i];
    }
  }

  void zero() override {
    use();
    if (stays()) {
      zero_or_leave(whole_.flat());
    } else {
      sum_.zero_();
    }
  }

  void allocate() override {
    if (stays()) return;
    const MemoryScope scope(MemoryKind::kGradients);
    resize_storage(whole_.flat(), whole_bytes_);
    zero_or_leave(whole_.flat());
    if (direct_) behind().zero_();
  }

  void begin_reduction(comm::Mode mode) override {
    const at::NoGradGuard no_grad;
    const MemoryScope scope(MemoryKind::kGradients);
    const Cut& cut = bundle_.cut;
    complete();
    if (shards_.size() == 1) {  // all of it is this rank's piece, as it lies
      reduced_ = take_memory(whole_.flat());
      return;
    }
    direct_ ? take_where_it_lies() : pack();
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

  // What is reduced with the one parameter, and read by nobody.
  at::Tensor behind() const {
    const int64_t numel = views_.front().numel();
    return whole_.flat().narrow(0, numel, whole_.flat().numel() - numel);
  }

  // Behind the parameter, so that pieces of all ranks have room.
  int64_t extra() const {
    if (!direct_) return 0;
    const Cut& cut = bundle_.cut;
    const Cut whole(cut.full_shapes(), {0}, /*ranks=*/1);
    return cut.ranks() * cut.numel() - whole.numel();
  }

  void take_where_it_lies() {
    at::Tensor all = whole_.flat();
    if (!stays()) all = take_memory(all);
    const std::vector<int64_t> pieces = {shards_.size(), bundle_.cut.numel()};
    packed_ = all.narrow(0, 0, pieces[0] * pieces[1]).view(pieces);
  }

  void pack() {
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
  }

  void take_reduced() {
    for (size_t i = 0; i < local_.size(); ++i) {
      local_[i].copy_(bundle_.cut.in_piece(reduced_, i, shards_.rank()));
    }
    reduced_ = at::Tensor();
  }

  const Bundle& bundle_;
  comm::Group& shards_;
  comm::Group& peers_;
  const bool direct_;              // reduced where the whole gradient lies
  comm::FlatGradients whole_;      // as autograd adds to them
  std::vector<at::Tensor> views_;  // of whole_, by parameter
  const int64_t whole_bytes_;
  at::Tensor sum_;  // of stages 2 and 3: this rank's piece, reduced so far
  at::Tensor packed_, reduced_;  // of the reduction under way
  comm::Work work_;
};

}  // namespace

std::unique_ptr<GradientStorage> make_gradients(const Bundle& bundle,
                                                const GradientOptions& options,
                                                comm::Group& shards,
                                                comm::Group& peers) {
  const at::NoGradGuard no_grad;
  if (bundle.is_sharded()) {
    return std::make_unique<ScatteredGradients>(bundle, options, shards, peers);
  }
  return std::make_unique<ReplicatedGradients>(bundle, options, peers);
}

}  // namespace tessera::parallel::data
