// The forms of C10dForms that are an all_to_all.
#include "tessera/comm/base/c10d_forms.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "tessera/comm/base/tensor_lists.h"
#include "tessera/core/error.h"

namespace tessera::comm {

using c10d::OpType;

namespace {

template <typename Options>
c10d::AllToAllOptions all_to_all_options(const Options& options) {
  c10d::AllToAllOptions all;
  all.timeout = options.timeout;
  all.asyncOp = options.asyncOp;
  return all;
}

}  // namespace

C10dForms::Pending C10dForms::exchange(OpType type, const Tensors& outputs,
                                       const Tensors& inputs,
                                       at::ScalarType dtype,
                                       const c10d::AllToAllOptions& options) {
  at::AutoDispatchBelowAutograd guard;
  const std::vector<int64_t> nothing(size_, 0);
  auto out_sizes = outputs.empty() ? nothing : sizes_of(outputs);
  auto in_sizes = inputs.empty() ? nothing : sizes_of(inputs);
  at::Tensor out = flat_for(outputs, dtype);
  at::Tensor in = flattened(inputs, dtype);
  std::vector<Pending> parts{
      alltoall_base(out, in, out_sizes, in_sizes, options)};
  return join(type, outputs, parts,
              [outputs, out] { copy_each(outputs, parts_of(out, outputs)); });
}

C10dForms::Pending C10dForms::alltoall(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllToAllOptions& options) {
  check_list("all_to_all", outputs, size_);
  check_list("all_to_all", inputs, size_);
  const at::ScalarType dtype = inputs.front().scalar_type();
  check_dtype("all_to_all", inputs, dtype);
  check_dtype("all_to_all", outputs, dtype);
  return exchange(OpType::ALLTOALL, outputs, inputs, dtype, options);
}

C10dForms::Pending C10dForms::gather(TensorLists& outputs, Tensors& inputs,
                                     const c10d::GatherOptions& options) {
  const at::Tensor& input = only("gather", inputs);
  Tensors received;
  if (rank_ == options.rootRank) {
    TS_CHECK(outputs.size() == 1, "gather: ", outputs.size(),
             " lists of outputs on the root. Give one.");
    received = outputs.front();
    check_list("gather", received, size_);
    check_dtype("gather", received, input.scalar_type());
    check_fits("gather", input, received.at(rank_));
  }
  Tensors sent(size_, at::empty({0}, input.options()));
  sent.at(options.rootRank) = input;
  return exchange(OpType::GATHER, received, sent, input.scalar_type(),
                  all_to_all_options(options));
}

C10dForms::Pending C10dForms::scatter(Tensors& outputs, TensorLists& inputs,
                                      const c10d::ScatterOptions& options) {
  const at::Tensor& output = only("scatter", outputs);
  Tensors sent;
  if (rank_ == options.rootRank) {
    TS_CHECK(inputs.size() == 1, "scatter: ", inputs.size(),
             " lists of inputs on the root. Give one.");
    sent = inputs.front();
    check_list("scatter", sent, size_);
    check_dtype("scatter", sent, output.scalar_type());
    check_fits("scatter", output, sent.at(rank_));
  }
  Tensors received(size_, at::empty({0}, output.options()));
  received.at(options.rootRank) = output;
  return exchange(OpType::SCATTER, received, sent, output.scalar_type(),
                  all_to_all_options(options));
}

}  // namespace tessera::comm
