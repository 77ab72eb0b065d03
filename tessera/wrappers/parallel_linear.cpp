#include "tessera/wrappers/parallel_linear.h"

#include <ATen/ATen.h>

#include <optional>

#include "tessera/comm/autograd.h"
#include "tessera/core/error.h"
#include "tessera/wrappers/detail/heard_memory.h"
#include "tessera/wrappers/detail/heard_products.h"
#include "tessera/wrappers/detail/same_parameters.h"
#include "tessera/wrappers/detail/shares.h"

namespace tessera {

using Kind = ParallelStyle::Kind;

int64_t ParallelStyle::weight_dim() const {
  switch (kind) {
    case Kind::kColumn:
    case Kind::kVocabulary:
      return 0;
    case Kind::kRow:
      return 1;
    case Kind::kSequence:
      break;
  }
  return -1;
}

void check(const ParallelStyle& style) {
  const bool in_sequence = style.output == Lies::kBySequence;
  switch (style.kind) {
    case Kind::kColumn:
      TS_CHECK_CONFIG(!in_sequence,
                      "tensor parallel: a column linear gives features of all "
                      "of the sequence; its output lies by features or whole.");
      return;
    case Kind::kRow:
      TS_CHECK_CONFIG(style.input != Lies::kBySequence,
                      "tensor parallel: a row linear takes features of all of "
                      "the sequence; its input lies by features or whole.");
      TS_CHECK_CONFIG(style.output != Lies::kByFeatures,
                      "tensor parallel: a row linear's output lies whole or by "
                      "sequence.");
      return;
    case Kind::kVocabulary:
      TS_CHECK_CONFIG(style.output != Lies::kByFeatures,
                      "tensor parallel: an embedding's output lies whole or by "
                      "sequence.");
      return;
    case Kind::kSequence:
      return;
  }
}

namespace {

// A sum of which each rank has a part.
at::Tensor sum_of(const at::Tensor& part, const ParallelStyle& style,
                  comm::Group& group) {
  if (style.output == Lies::kWhole) {
    return comm::all_reduce_with_identity(part, group);
  }
  return comm::reduce_scatter_with_all_gather(part, style.sequence_dim, group);
}

at::Tensor column_linear(const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& bias, const ParallelStyle& style,
                         comm::Group& group) {
  at::Tensor all;
  switch (style.input) {
    case Lies::kWhole:
      all = comm::identity_with_all_reduce(x, group);
      break;
    case Lies::kByFeatures:
      all = comm::all_gather_with_reduce_scatter(x, -1, group);
      break;
    case Lies::kBySequence:
      all = comm::all_gather_with_reduce_scatter(x, style.sequence_dim, group);
      break;
  }
  const at::Tensor y = wrappers::linear(all, weight, bias);
  return style.output == Lies::kWhole
             ? comm::all_gather_with_split(y, -1, group)
             : y;
}

at::Tensor row_linear(const at::Tensor& x, const at::Tensor& weight,
                      const at::Tensor& bias, const ParallelStyle& style,
                      comm::Group& group) {
  const at::Tensor mine = style.input == Lies::kWhole
                              ? comm::split_with_all_gather(x, -1, group)
                              : x;
  const at::Tensor y = sum_of(wrappers::linear(mine, weight), style, group);
  if (!bias.defined()) return y;
  // A part of the sequence gives a part of its gradient.
  return style.output == Lies::kBySequence
             ? y + comm::identity_with_all_reduce(bias, group)
             : y + bias;
}

}  // namespace

at::Tensor parallel_linear(const at::Tensor& x, const at::Tensor& weight,
                           const at::Tensor& bias, const ParallelStyle& style,
                           comm::Group& group) {
  return style.kind == Kind::kRow
             ? row_linear(x, weight, bias, style, group)
             : column_linear(x, weight, bias, style, group);
}

at::Tensor parallel_embedding(const at::Tensor& ids, const at::Tensor& weight,
                              const ParallelStyle& style, comm::Group& group,
                              int64_t padding_idx) {
  const int64_t entries = weight.size(0);
  const int64_t first = group.rank() * entries;
  const auto between = [&](int64_t begin, int64_t end) {
    return ids.ge(begin).logical_and_(ids.lt(end));
  };
  const at::Tensor here = between(first, first + entries);
  const at::Tensor elsewhere =
      between(0, entries * group.size()).logical_and_(~here);
  const bool pads = padding_idx >= first && padding_idx < first + entries;
  const at::Tensor rows =
      at::embedding(weight, (ids - first).masked_fill_(elsewhere, 0),
                    pads ? padding_idx - first : -1);
  return sum_of(rows * here.unsqueeze(-1).to(rows.scalar_type()), style, group);
}

namespace wrappers {

struct ParallelLinearImpl::KnownShares : Substitute {
  explicit KnownShares(comm::Group& of) : tp(of), parameters(*this) {}
  bool run(const c10::OperatorHandle& op, torch::jit::Stack* stack,
           int64_t /*tag*/) override {
    return run_product(op, stack);
  }
  const comm::Group& group() const override { return tp; }

  comm::Group& tp;
  SubstitutedParameters parameters;
};

ParallelLinearImpl::ParallelLinearImpl(const torch::nn::LinearOptions& whole,
                                       comm::Group& group,
                                       const ParallelStyle& style)
    : torch::nn::Module("ParallelLinear"),
      group_(group),
      style_(style),
      known_(std::make_shared<KnownShares>(group)) {
  check(style);
  const torch::nn::Linear linear(whole);
  broadcast_all(linear->parameters(), group, /*root=*/0);
  const auto own = [&](const char* name, const at::Tensor& values,
                       int64_t dim) {
    const at::Tensor share =
        register_parameter(name, share_of(values, dim, group, "linear"));
    known_->parameters.add(share, /*tag=*/0, dim);
    return share;
  };
  weight = own("weight", linear->weight, style.weight_dim());
  if (!whole.bias()) return;
  bias = own("bias", linear->bias, style.kind == Kind::kColumn ? 0 : -1);
}

// Parameters get other memory, which is known by then.
void ParallelLinearImpl::move(const std::function<void()>& parameters) {
  const CarriedSubstitute of_weight(weight);
  const auto of_bias = bias.defined()
                           ? std::make_optional<CarriedSubstitute>(bias)
                           : std::nullopt;
  parameters();
  of_weight.put(weight);
  if (of_bias) of_bias->put(bias);
}

void ParallelLinearImpl::to(torch::Device device, torch::Dtype dtype,
                            bool non_blocking) {
  move([&] { Module::to(device, dtype, non_blocking); });
}
void ParallelLinearImpl::to(torch::Dtype dtype, bool non_blocking) {
  move([&] { Module::to(dtype, non_blocking); });
}
void ParallelLinearImpl::to(torch::Device device, bool non_blocking) {
  move([&] { Module::to(device, non_blocking); });
}

at::Tensor ParallelLinearImpl::forward(const at::Tensor& x) {
  return parallel_linear(x, weight, bias, style_, group_);
}

}  // namespace wrappers

ColumnParallelLinearImpl::ColumnParallelLinearImpl(
    const torch::nn::LinearOptions& whole, comm::Group& group,
    const ParallelStyle& style)
    : ParallelLinearImpl(whole, group, style) {
  TS_CHECK_CONFIG(style.kind == Kind::kColumn,
                  "tensor parallel: a ColumnParallelLinear of another style.");
}

RowParallelLinearImpl::RowParallelLinearImpl(
    const torch::nn::LinearOptions& whole, comm::Group& group,
    const ParallelStyle& style)
    : ParallelLinearImpl(whole, group, style) {
  TS_CHECK_CONFIG(style.kind == Kind::kRow,
                  "tensor parallel: a RowParallelLinear of another style.");
}

}  // namespace tessera
