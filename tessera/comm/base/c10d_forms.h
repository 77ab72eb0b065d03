// The forms of collectives that PyTorch's front ends call, made from the few
// that a backend here implements: allreduce, broadcast, _allgather_base,
// _reduce_scatter_base and alltoall_base.
//
// Lists:   their tensors may be strided, empty or, where a form allows it, of
//          different sizes; they are moved through one flat copy.
// Comm:    each form is one primitive, but for lists of uneven sizes (one
//          broadcast or reduction a rank) and coalesced forms (one a tensor).
// Futures: hold the list of outputs, of the first list where there are many.
// Errors:  TS_CHECK at the call, naming the form, where lists do not fit the
//          group or each other. What a primitive fails with fails the form.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <vector>

namespace tessera::comm {

class C10dForms : public c10d::Backend {
 public:
  using c10d::Backend::Backend;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using Pending = c10::intrusive_ptr<c10d::Work>;

  Pending allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override;
  // The sum of sparse tensors, of as many elements as each rank has.
  Pending allreduce_sparse(Tensors& tensors,
                           const c10d::AllreduceOptions& options) override;
  // An all-reduce of which the other ranks drop the result.
  Pending reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Pending allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  // outputs[rank][k] is inputs[k] of that rank.
  Pending allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  Pending allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  Pending gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  Pending scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  Pending reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  Pending reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override;
  Pending alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;

 private:
  // Sends inputs[r] to rank r and receives outputs[r] from it, as one flat
  // alltoall_base. An empty list is nothing to or from anyone.
  Pending exchange(c10d::OpType type, const Tensors& outputs,
                   const Tensors& inputs, at::ScalarType dtype,
                   const c10d::AllToAllOptions& options);
  Pending gather_uneven(const Tensors& outputs, const at::Tensor& input,
                        const c10d::AllgatherOptions& options);
  Pending reduce_scatter_uneven(const at::Tensor& output, const Tensors& inputs,
                                const c10d::ReduceScatterOptions& options);
  // Done when all `parts` are and `then` has run.
  Pending join(c10d::OpType type, Tensors results,
               const std::vector<Pending>& parts,
               std::function<void()> then = nullptr);
};

}  // namespace tessera::comm
