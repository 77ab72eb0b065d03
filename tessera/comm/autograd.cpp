#include "tessera/comm/autograd.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>
#include <utility>

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

// Of a piece of rank 0, which none is longer than.
int64_t longest_piece(int64_t whole, const Group& group) {
  return (whole + group.size() - 1) / group.size();
}

// Pieces of a dim of `whole`.
at::Tensor gathered(const at::Tensor& x, int64_t dim, int64_t whole,
                    Group& group) {
  at::Tensor piece = x.contiguous();
  const int64_t longest = longest_piece(whole, group);
  if (x.size(dim) < longest) {
    std::vector<int64_t> padded = x.sizes().vec();
    padded[dim] = longest;
    piece = at::zeros(padded, x.options());
    piece.narrow(dim, 0, x.size(dim)).copy_(x);
  }
  std::vector<int64_t> shape = piece.sizes().vec();
  shape.insert(shape.begin(), group.size());
  const at::Tensor pieces = at::empty(shape, piece.options());
  group.all_gather(pieces, piece, Mode::kBlocking);
  const at::Tensor all =
      dim == 0 ? pieces.flatten(0, 1) : at::cat(pieces.unbind(0), dim);
  // What is padded is at the end.
  return all.size(dim) == whole ? all : all.narrow(dim, 0, whole);
}

at::Tensor gathered(const at::Tensor& x, int64_t dim, Group& group) {
  return gathered(x, dim, x.size(dim) * group.size(), group);
}

void check_divides(const at::Tensor& x, int64_t dim, const Group& group) {
  TS_CHECK(x.size(dim) % group.size() == 0, "dim ", dim, " of a tensor ",
           x.sizes(), " does not divide by the ", group.size(),
           " ranks of group '", group.name(), "'.");
}

int64_t begin_of_piece(int64_t whole, const Group& group) {
  return std::min(whole, group.rank() * longest_piece(whole, group));
}

int64_t size_of_piece(int64_t whole, const Group& group) {
  return std::min(whole - begin_of_piece(whole, group),
                  longest_piece(whole, group));
}

at::Tensor own_piece(const at::Tensor& x, int64_t dim, Group& group) {
  const int64_t whole = x.size(dim);
  return x
      .narrow(dim, begin_of_piece(whole, group), size_of_piece(whole, group))
      .contiguous();
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

// Room for what all_to_all brings for x.
at::Tensor room_for(const at::Tensor& x, const std::vector<int64_t>& splits) {
  std::vector<int64_t> shape = x.sizes().vec();
  if (!splits.empty()) {
    shape[0] = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  }
  return at::empty(shape, x.options());
}

at::Tensor exchanged(const at::Tensor& x, Group& group,
                     const std::vector<int64_t>& output_splits,
                     const std::vector<int64_t>& input_splits) {
  at::Tensor output = room_for(x, output_splits);
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
                            int64_t dim, int64_t whole, Group& group) {
    save_group(context, group);
    context->saved_data["dim"] = dim;
    TS_CHECK(x.size(dim) == size_of_piece(whole, group), "dim ", dim, " of a ",
             "tensor ", x.sizes(), " is not the piece of ",
             size_of_piece(whole, group), " that rank ", group.rank(),
             " of group '", group.name(), "' has of ", whole, ".");
    return gathered(x, dim, whole, group);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {own_piece(grads[0], saved_dim(context), saved_group(context)),
            {},
            {},
            {}};
  }
};

// forward: this rank's piece; backward: all_gather along dim.
struct SplitWithAllGather : Function<SplitWithAllGather> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            int64_t dim, Group& group) {
    save_group(context, group);
    context->saved_data["dim"] = dim;
    context->saved_data["whole"] = x.size(dim);
    return own_piece(x, dim, group);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {
        gathered(grads[0], saved_dim(context),
                 context->saved_data["whole"].toInt(), saved_group(context)),
        {},
        {}};
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

}  // namespace

// An all_to_all under way, forward or backward.
struct Journey {
  at::Tensor start(const at::Tensor& x, const std::vector<int64_t>& to,
                   const std::vector<int64_t>& from) {
    sent = x.contiguous();
    at::Tensor output = room_for(x, to);
    work = group.all_to_all(output, sent, to, from, Mode::kAsync);
    return output;
  }
  void finish() {
    work.wait();
    work = {};
    sent.reset();
  }

  Group& group;
  const std::vector<int64_t> output_splits, input_splits;
  Work work = {};
  at::Tensor sent = {};  // until it is there
  at::Tensor came_back = {};
};

namespace {

using SharedJourney = std::shared_ptr<Journey>;

struct JourneyReference : torch::CustomClassHolder {
  explicit JourneyReference(SharedJourney of) : journey(std::move(of)) {}
  SharedJourney journey;
};

void save(AutogradContext* context, const SharedJourney& journey) {
  context->saved_data["journey"] =
      c10::IValue::make_capsule(c10::make_intrusive<JourneyReference>(journey));
}

// Of what moves between ranks in a backward.
void refuse_second_derivatives() {
  TS_CHECK(!at::GradMode::is_enabled(),
           "a collective has no second derivative here: backward with "
           "create_graph is not to be had through it.");
}

Journey& saved_journey(AutogradContext* context) {
  refuse_second_derivatives();
  const auto holder = context->saved_data["journey"].toCapsule();
  return *static_cast<JourneyReference&>(*holder).journey;
}

// forward: starts an all_to_all; backward: awaits that of the gradients, which
// FinishAllToAll started. What comes from there says when, no more.
struct StartAllToAll : Function<StartAllToAll> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const SharedJourney& journey) {
    save(context, journey);
    return journey->start(x, journey->output_splits, journey->input_splits);
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list&) {
    Journey& journey = saved_journey(context);
    journey.finish();
    return {std::exchange(journey.came_back, {}), {}};
  }
};

struct FinishAllToAll : Function<FinishAllToAll> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const SharedJourney& journey) {
    save(context, journey);
    journey->finish();
    return rows.view_as(rows);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    Journey& journey = saved_journey(context);
    journey.came_back =
        journey.start(grads[0], journey.input_splits, journey.output_splits);
    return {grads[0], {}};
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
  refuse_second_derivatives();
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

at::Tensor all_gather_with_split(const at::Tensor& x, int64_t dim, Group& group,
                                 std::optional<int64_t> whole) {
  if (group.size() == 1) return x;
  dim = wrapped(dim, x);
  return AllGatherWithSplit::apply(
      x, dim, whole.value_or(x.size(dim) * group.size()), group);
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

Travelling start_all_to_all(const at::Tensor& x, Group& group,
                            const std::vector<int64_t>& output_splits,
                            const std::vector<int64_t>& input_splits) {
  auto journey =
      std::make_shared<Journey>(Journey{group, output_splits, input_splits});
  return {StartAllToAll::apply(x, journey), journey};
}

at::Tensor finish_all_to_all(const Travelling& travelling) {
  return FinishAllToAll::apply(travelling.rows, travelling.journey);
}

}  // namespace tessera::comm
