// Tensor-parallel layers for modules of one's own: parallelize() computes by
// them what a plan names, and they stand as modules by themselves.
//
// y = x W^T + b with W (out, in) shared out over a group:
//   column  rank r has rows of W and b, and so features of y: a piece of `out`
//   row     rank r has columns of W, and takes features of x; its y is a part
//           of a sum over the ranks; b is whole, and added once
// Layouts: how a tensor between layers lies over the ranks (Lies).
// Comm:    column: input whole: none, and an all_reduce of dx; in sequence: an
//          all_gather, and a reduce_scatter of dx. Row: output whole: an
//          all_reduce, none back; in sequence: a reduce_scatter, and an
//          all_gather back. A column's output made whole: an all_gather, none
//          back; a row's input that is whole: none, and an all_gather back.
// Errors:  features that do not divide by the ranks, and layouts that a layer
//          does not have: TS_CHECK_CONFIG.
// Threads: the group outlives the graph.
// Source:  Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022,
//          arXiv 2205.05198.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "tessera/comm/group.h"

namespace tessera {

enum class Lies {
  kWhole,       // the same on every rank
  kByFeatures,  // a piece of the last dim
  kBySequence,  // a piece of dim ParallelStyle::sequence_dim
};

struct ParallelStyle {
  enum class Kind {
    kColumn,
    kRow,
    kVocabulary,  // an embedding's rows are shared out
    kSequence,    // parameters whole; they see a part of the sequence (norms)
  };
  Kind kind = Kind::kColumn;
  Lies input = Lies::kWhole, output = Lies::kByFeatures;
  int64_t sequence_dim = 1;  // (batch, sequence, features)

  static ParallelStyle column(Lies input = Lies::kWhole,
                              Lies output = Lies::kByFeatures) {
    return {Kind::kColumn, input, output};
  }
  static ParallelStyle row(Lies input = Lies::kByFeatures,
                           Lies output = Lies::kWhole) {
    return {Kind::kRow, input, output};
  }
  static ParallelStyle vocabulary(Lies output = Lies::kWhole) {
    return {Kind::kVocabulary, Lies::kWhole, output};
  }
  static ParallelStyle sequence() {
    return {Kind::kSequence, Lies::kBySequence, Lies::kBySequence};
  }
  // The dim of `weight` that is shared out; -1: none.
  int64_t weight_dim() const;
};

// Refuses layouts that a layer of this style does not have.
void check(const ParallelStyle& style);

// `weight`, and for a column `bias`, are this rank's. bias may be undefined.
at::Tensor parallel_linear(const at::Tensor& x, const at::Tensor& weight,
                           const at::Tensor& bias, const ParallelStyle& style,
                           comm::Group& group);

// `weight`: this rank's entries of a vocabulary of as many on every rank.
// padding_idx, of the whole vocabulary: an entry without a gradient; -1: none.
// An id beyond the vocabulary is refused as LibTorch does.
at::Tensor parallel_embedding(const at::Tensor& ids, const at::Tensor& weight,
                              const ParallelStyle& style, comm::Group& group,
                              int64_t padding_idx = -1);

namespace wrappers {

// What both layers are.
class ParallelLinearImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x);
  void to(torch::Device device, torch::Dtype dtype,
          bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  at::Tensor weight, bias;

 protected:
  // The values of rank 0.
  ParallelLinearImpl(const torch::nn::LinearOptions& whole, comm::Group& group,
                     const ParallelStyle& style);

 private:
  comm::Group& group_;
  ParallelStyle style_;
  void move(const std::function<void()>& parameters);
  struct KnownShares;  // that they are parts, to whoever asks
  std::shared_ptr<KnownShares> known_;
};

}  // namespace wrappers

struct ColumnParallelLinearImpl : wrappers::ParallelLinearImpl {
  ColumnParallelLinearImpl(
      const torch::nn::LinearOptions& whole, comm::Group& group,
      const ParallelStyle& style = ParallelStyle::column());
};
TORCH_MODULE(ColumnParallelLinear);

struct RowParallelLinearImpl : wrappers::ParallelLinearImpl {
  RowParallelLinearImpl(const torch::nn::LinearOptions& whole,
                        comm::Group& group,
                        const ParallelStyle& style = ParallelStyle::row());
};
TORCH_MODULE(RowParallelLinear);

}  // namespace tessera
