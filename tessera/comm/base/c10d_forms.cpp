#include "tessera/comm/base/c10d_forms.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "tessera/comm/base/tensor_lists.h"
#include "tessera/comm/base/worker.h"
#include "tessera/core/error.h"

namespace tessera::comm {

using c10d::OpType;

C10dForms::Pending C10dForms::join(OpType type, Tensors results,
                                   const std::vector<Pending>& parts,
                                   std::function<void()> then) {
  struct Rest {
    std::atomic<size_t> open;
    std::mutex mutex;
    std::exception_ptr error;  // the first
  };
  auto rest = std::make_shared<Rest>();
  rest->open = std::max<size_t>(parts.size(), 1);
  auto work = c10::make_intrusive<PendingWork>(rank_, type, std::move(results));
  const auto finish_one =
      [rest, work, then = std::move(then)](const std::exception_ptr& error) {
        if (error) {
          std::lock_guard lock(rest->mutex);
          if (!rest->error) rest->error = error;
        }
        if (--rest->open > 0) return;
        if (!rest->error && then) {
          try {
            at::AutoDispatchBelowAutograd guard;
            then();
          } catch (const std::exception&) {
            rest->error = std::current_exception();
          }
        }
        work->complete(rest->error);
      };
  for (const Pending& part : parts) {
    part->getFuture()->addCallback([finish_one](c10::ivalue::Future& future) {
      finish_one(future.hasError() ? future.exception_ptr() : nullptr);
    });
  }
  if (parts.empty()) finish_one(nullptr);
  return work;
}

C10dForms::Pending C10dForms::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  at::AutoDispatchBelowAutograd guard;
  std::vector<Pending> parts;
  Tensors dense;  // what is reduced in place of a strided tensor
  for (const at::Tensor& tensor : tensors) {
    dense.push_back(tensor.contiguous());
    Tensors one{dense.back()};
    parts.push_back(allreduce(one, options));
  }
  return join(OpType::ALLREDUCE_COALESCED, tensors, parts, [tensors, dense] {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].is_same(dense[i])) tensors[i].copy_(dense[i]);
    }
  });
}

// The number of elements differs by rank: the ranks tell it each other first,
// which is waited for here, so that what follows is enqueued in order.
C10dForms::Pending C10dForms::allreduce_sparse(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  at::AutoDispatchBelowAutograd guard;
  TS_CHECK(tensors.size() == 1, "all_reduce (sparse): got ", tensors.size(),
           " tensors. Give one.");
  TS_CHECK(options.reduceOp.op_ == c10d::ReduceOp::SUM,
           "all_reduce (sparse): only the sum of sparse tensors is defined.");
  const at::Tensor tensor = tensors.front();
  const at::Tensor own = tensor.coalesce();
  c10d::AllgatherOptions gather;
  gather.timeout = options.timeout;
  at::Tensor count = at::tensor({own._nnz()}, at::kLong);
  at::Tensor counts = at::empty({size_}, at::kLong);
  _allgather_base(counts, count, gather)->wait();

  TensorLists indices(1);
  TensorLists values(1);
  std::vector<int64_t> shape = own._values().sizes().vec();
  for (int rank = 0; rank < size_; ++rank) {
    shape[0] = counts[rank].item<int64_t>();
    indices[0].push_back(at::empty({own.sparse_dim(), shape[0]}, at::kLong));
    values[0].push_back(at::empty(shape, own._values().options()));
  }
  Tensors own_indices{own._indices()};
  Tensors own_values{own._values()};
  std::vector<Pending> parts{allgather(indices, own_indices, gather),
                             allgather(values, own_values, gather)};
  return join(
      OpType::_ALLREDUCE_SPARSE, tensors, parts,
      [tensor, indices = indices[0], values = values[0]] {
        tensor.copy_(at::sparse_coo_tensor(at::cat(indices, 1),
                                           at::cat(values, 0), tensor.sizes())
                         .coalesce());
      });
}

C10dForms::Pending C10dForms::reduce(Tensors& tensors,
                                     const c10d::ReduceOptions& options) {
  at::AutoDispatchBelowAutograd guard;
  const at::Tensor tensor = only("reduce", tensors);
  const bool is_root = rank_ == options.rootRank;
  const bool in_place = is_root && tensor.is_contiguous();
  Tensors sum{in_place ? tensor : tensor.clone(at::MemoryFormat::Contiguous)};
  c10d::AllreduceOptions all;
  all.reduceOp = options.reduceOp;
  all.timeout = options.timeout;
  all.asyncOp = options.asyncOp;
  std::vector<Pending> parts{allreduce(sum, all)};
  return join(OpType::REDUCE, {tensor}, parts,
              [tensor, is_root, in_place, result = sum.front()] {
                if (is_root && !in_place) tensor.copy_(result);
              });
}

C10dForms::Pending C10dForms::allgather(TensorLists& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  at::AutoDispatchBelowAutograd guard;
  const at::Tensor& input = only("all_gather", inputs);
  TS_CHECK(outputs.size() == 1, "all_gather: ", outputs.size(),
           " lists of outputs. Give one.");
  const Tensors& list = outputs.front();
  check_list("all_gather", list, size_);
  check_dtype("all_gather", list, input.scalar_type());
  check_fits("all_gather", input, list.at(rank_));
  if (!is_even(list)) return gather_uneven(list, input, options);
  at::Tensor flat = flat_for(list, input.scalar_type());
  at::Tensor own = input.contiguous();
  std::vector<Pending> parts{_allgather_base(flat, own, options)};
  return join(OpType::ALLGATHER, list, parts,
              [list, flat] { copy_each(list, parts_of(flat, list)); });
}

C10dForms::Pending C10dForms::gather_uneven(
    const Tensors& outputs, const at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  const at::Tensor flat = flat_for(outputs, input.scalar_type());
  const Tensors pieces = parts_of(flat, outputs);
  pieces[rank_].copy_(input.view_as(pieces[rank_]));
  std::vector<Pending> parts;
  for (int root = 0; root < size_; ++root) {
    c10d::BroadcastOptions from;
    from.rootRank = root;
    from.timeout = options.timeout;
    from.asyncOp = options.asyncOp;
    Tensors piece{pieces[root]};
    parts.push_back(broadcast(piece, from));
  }
  return join(OpType::ALLGATHER, outputs, parts,
              [outputs, pieces] { copy_each(outputs, pieces); });
}

C10dForms::Pending C10dForms::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  TS_CHECK(static_cast<int>(outputs.size()) == size_,
           "all_gather_coalesced: ", outputs.size(),
           " lists of outputs in a group of ", size_,
           " ranks. Give one for each rank.");
  std::vector<Pending> parts;
  Tensors results;
  for (const Tensors& list : outputs) {
    check_pairs("all_gather_coalesced", list, inputs);
    results.insert(results.end(), list.begin(), list.end());
  }
  for (size_t k = 0; k < inputs.size(); ++k) {
    TensorLists of_each(1);
    for (const Tensors& list : outputs) of_each.front().push_back(list[k]);
    Tensors input{inputs[k]};
    parts.push_back(allgather(of_each, input, options));
  }
  return join(OpType::ALLGATHER_COALESCED, results, parts);
}

C10dForms::Pending C10dForms::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  check_pairs("all_gather_into_tensor", outputs, inputs);
  std::vector<Pending> parts;
  for (size_t k = 0; k < inputs.size(); ++k) {
    parts.push_back(_allgather_base(outputs[k], inputs[k], options));
  }
  return join(OpType::COALESCED, outputs, parts);
}

C10dForms::Pending C10dForms::reduce_scatter(
    Tensors& outputs, TensorLists& inputs,
    const c10d::ReduceScatterOptions& options) {
  at::AutoDispatchBelowAutograd guard;
  const at::Tensor output = only("reduce_scatter", outputs);
  TS_CHECK(inputs.size() == 1, "reduce_scatter: ", inputs.size(),
           " lists of inputs. Give one.");
  const Tensors& list = inputs.front();
  check_list("reduce_scatter", list, size_);
  check_dtype("reduce_scatter", list, output.scalar_type());
  check_fits("reduce_scatter", output, list.at(rank_));
  if (!is_even(list)) return reduce_scatter_uneven(output, list, options);
  at::Tensor flat = flattened(list, output.scalar_type());
  at::Tensor sum = output.contiguous();
  std::vector<Pending> parts{_reduce_scatter_base(sum, flat, options)};
  return join(OpType::REDUCE_SCATTER, outputs, parts, [output, sum] {
    if (!output.is_same(sum)) output.copy_(sum);
  });
}

C10dForms::Pending C10dForms::reduce_scatter_uneven(
    const at::Tensor& output, const Tensors& inputs,
    const c10d::ReduceScatterOptions& options) {
  std::vector<Pending> parts;
  at::Tensor sum = inputs[rank_].clone(at::MemoryFormat::Contiguous);
  for (int root = 0; root < size_; ++root) {
    c10d::ReduceOptions to;
    to.reduceOp = options.reduceOp;
    to.rootRank = root;
    to.timeout = options.timeout;
    to.asyncOp = options.asyncOp;
    Tensors piece{root == rank_ ? sum : inputs[root]};
    parts.push_back(reduce(piece, to));
  }
  return join(OpType::REDUCE_SCATTER, {output}, parts,
              [output, sum] { output.copy_(sum.view_as(output)); });
}

C10dForms::Pending C10dForms::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs,
    const c10d::ReduceScatterOptions& options) {
  check_pairs("reduce_scatter_tensor", outputs, inputs);
  std::vector<Pending> parts;
  for (size_t k = 0; k < inputs.size(); ++k) {
    parts.push_back(_reduce_scatter_base(outputs[k], inputs[k], options));
  }
  return join(OpType::_REDUCE_SCATTER_BASE, outputs, parts);
}

}  // namespace tessera::comm
