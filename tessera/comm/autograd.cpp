#include "tessera/comm/autograd.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct GroupReference : torch::CustomClassHolder {
  explicit GroupReference(Group& of) : group(of) {}
  Group& group;
};

int64_t saved_dim(AutogradContext* context) {
  return context->saved_data["dim"].toInt();
}

// The plain collectives on tensors of any layout, along a dim.

at::Tensor summed(const at::Tensor& x, Group& group) {
  at::Tensor sum = x.clone(at::MemoryFormat::Contiguous);
  group.all_reduce(sum, ReduceOp::kSum, Mode::kBlocking);
  return sum;
}

at::Tensor gathered(const at::Tensor& x, int64_t dim, Group& group) {
  const at::Tensor piece = x.contiguous();
  std::vector<int64_t> shape = piece.sizes().vec();
  shape.insert(shape.begin(), group.size());
  const at::Tensor pieces = at::empty(shape, piece.options());
  group.all_gather(pieces, piece, Mode::kBlocking);
  if (dim == 0) return pieces.flatten(0, 1);
  return at::cat(pieces.unbind(0), dim);
}

void check_divides(const at::Tensor& x, int64_t dim, const Group& group) {
  TS_CHECK(x.size(dim) % group.size() == 0, "dim ", dim, " of a tensor ",
           x.sizes(), " does not divide by the ", group.size(),
           " ranks of group '", group.name(), "'.");
}

at::Tensor own_piece(const at::Tensor& x, int64_t dim, Group& group) {
  check_divides(x, dim, group);
  return x.chunk(group.size(), dim)[group.rank()].contiguous();
}

at::Tensor scattered_sum(const at::Tensor& x, int64_t dim, Group& group) {
  check_divides(x, dim, group);
  const at::Tensor pieces =
      dim == 0 ? x.contiguous() : at::stack(x.chunk(group.size(), dim));
  std::vector<int64_t> shape = x.sizes().vec();
  shape[dim] /= group.size();
  at::Tensor piece = at::empty(shape, x.options());
  group.reduce_scatter(piece, pieces, ReduceOp::kSum, Mode::kBlocking);
  return piece;
}

at::Tensor exchanged(const at::Tensor& x, Group& group,
                     const std::vector<int64_t>& output_splits,
                     const std::vector<int64_t>& input_splits) {
  std::vector<int64_t> shape = x.sizes().vec();
  if (!output_splits.empty()) {
    shape[0] =
        std::accumulate(output_splits.begin(), output_splits.end(), int64_t{0});
  }
  at::Tensor output = at::empty(shape, x.options());
  group.all_to_all(output, x.contiguous(), output_splits, input_splits,
                   Mode::kBlocking);
  return output;
}

// forward: identity; backward: all_reduce(sum). Megatron-LM's f, arXiv
// 1909.08053.
struct IdentityWithAllReduce : Function<IdentityWithAllReduce> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            Group& group) {
    save_group(context, group);
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {summed(grads[0], saved_group(context)), {}};
  }
};

// forward: all_reduce(sum); backward: identity. Megatron-LM's g, arXiv
// 1909.08053.
struct AllReduceWithIdentity : Function<AllReduceWithIdentity> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x,
                            Group& group) {
    return summed(x, group);
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], {}};
  }
};

// forward: all_gather along dim; backward: reduce_scatter(sum).
struct AllGatherWithReduceScatter : Function<AllGatherWithReduceScatter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            int64_t dim, Group& group) {
    save_group(context, group);
    context->saved_data["dim"] = dim;
    return gathered(x, dim, group);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {scattered_sum(grads[0], saved_dim(context), saved_group(context)),
            {},
            {}};
  }
};

// forward: reduce_scatter(sum) along dim; backward: all_gather.
struct ReduceScatterWithAllGather : Function<ReduceScatterWithAllGather> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            int64_t dim, Group& group) {
    save_group(context, group);
    context->saved_data["dim"] = dim;
    return scattered_sum(x, dim, group);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {
        gathered(grads[0], saved_dim(context), saved_group(context)), {}, {}};
  }
};

// forward: all_gather along dim; backward: this rank's piece.
struct AllGatherWithSplit : Function<AllGatherWithSplit> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            int64_t dim, Group& group) {
    save_group(context, group);
    context->saved_data["dim"] = dim;
    return gathered(x, dim, group);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {
        own_piece(grads[0], saved_dim(context), saved_group(context)), {}, {}};
  }
};

// forward: this rank's piece; backward: all_gather along dim.
struct SplitWithAllGather : Function<SplitWithAllGather> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            int64_t dim, Group& group) {
    save_group(context, group);
    context->saved_data["dim"] = dim;
    return own_piece(x, dim, group);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {
        gathered(grads[0], saved_dim(context), saved_group(context)), {}, {}};
  }
};

// forward: all_to_all; backward: all_to_all with the splits exchanged.
struct AllToAll : Function<AllToAll> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            Group& group,
                            const std::vector<int64_t>& output_splits,
                            const std::vector<int64_t>& input_splits) {
    save_group(context, group);
    context->saved_data["output_splits"] = output_splits;
    context->saved_data["input_splits"] = input_splits;
    return exchanged(x, group, output_splits, input_splits);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {exchanged(grads[0], saved_group(context),
                      context->saved_data["input_splits"].toIntVector(),
                      context->saved_data["output_splits"].toIntVector()),
            {},
            {},
            {}};
  }
};

int64_t wrapped(int64_t dim, const at::Tensor& x) {
  return at::maybe_wrap_dim(dim, x.dim());
}

}  // namespace

void save_group(AutogradContext* context, Group& group) {
  context->saved_data["group"] =
      c10::IValue::make_capsule(c10::make_intrusive<GroupReference>(group));
}

Group& saved_group(AutogradContext* context) {
  const auto holder = context->saved_data["group"].toCapsule();
  return static_cast<GroupReference&>(*holder).group;
}

at::Tensor identity_with_all_reduce(const at::Tensor& x, Group& group) {
  return group.size() == 1 ? x : IdentityWithAllReduce::apply(x, group);
}

at::Tensor all_reduce_with_identity(const at::Tensor& x, Group& group) {
  return group.size() == 1 ? x : AllReduceWithIdentity::apply(x, group);
}

at::Tensor all_gather_with_reduce_scatter(const at::Tensor& x, int64_t dim,
                                          Group& group) {
  if (group.size() == 1) return x;
  return AllGatherWithReduceScatter::apply(x, wrapped(dim, x), group);
}

at::Tensor reduce_scatter_with_all_gather(const at::Tensor& x, int64_t dim,
                                          Group& group) {
  if (group.size() == 1) return x;
  return ReduceScatterWithAllGather::apply(x, wrapped(dim, x), group);
}

at::Tensor all_gather_with_split(const at::Tensor& x, int64_t dim,
                                 Group& group) {
  if (group.size() == 1) return x;
  return AllGatherWithSplit::apply(x, wrapped(dim, x), group);
}

at::Tensor split_with_all_gather(const at::Tensor& x, int64_t dim,
                                 Group& group) {
  if (group.size() == 1) return x;
  return SplitWithAllGather::apply(x, wrapped(dim, x), group);
}

at::Tensor all_to_all(const at::Tensor& x, Group& group,
                      const std::vector<int64_t>& output_splits,
                      const std::vector<int64_t>& input_splits) {
  if (group.size() == 1) return x;
  return AllToAll::apply(x, group, output_splits, input_splits);
}

}  // namespace tessera::comm
