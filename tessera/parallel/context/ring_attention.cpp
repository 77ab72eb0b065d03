// Keys and values go round the ring; in the backward their gradients go with
// them, and come home with the last step.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "tessera/comm/autograd.h"
#include "tessera/nn/piece_attention.h"
#include "tessera/nn/wide_type.h"
#include "tessera/parallel/context/context_parallel.h"

namespace tessera::parallel::context {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Tensors of the same shape and type on every rank, in one message.
class Ring {
 public:
  explicit Ring(comm::Group& group) : group_(group) {}

  // Hands `mine` to the next rank and takes what the one before has: call
  // begin, compute, take.
  void begin(const at::Tensor& mine) {
    sent_ = mine;
    received_ = at::empty_like(mine);
    const int64_t n = group_.size(), rank = group_.rank();
    works_[0] = group_.send(sent_, (rank + 1) % n);
    works_[1] = group_.recv(received_, (rank + n - 1) % n);
  }
  at::Tensor take() {
    for (auto& work : works_) {
      work.wait();
      work = {};  // which holds its tensor
    }
    sent_ = at::Tensor();
    return std::exchange(received_, at::Tensor());
  }

 private:
  comm::Group& group_;
  at::Tensor sent_, received_;
  comm::Work works_[2];
};

// The pieces that this rank holds at a step of the ring.
Pieces pieces_at(int64_t step, const comm::Group& group) {
  const int64_t n = group.size();
  return pieces_of((group.rank() - step + n) % n, n);
}

class RingAttention : public Function<RingAttention> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v,
                            const nn::Sight& sight, comm::Group* group) {
    const Pieces mine = pieces_of(group->rank(), group->size());
    const at::Tensor own = at::stack({k, v});
    at::Tensor there = own;
    Ring ring(*group);
    nn::Seen seen;
    for (int64_t step = 0; step < group->size(); ++step) {
      const bool last = step + 1 == group->size();
      if (!last) ring.begin(there);
      nn::attend(q, mine, there[0], there[1], pieces_at(step, *group), sight,
                 seen);
      if (!last) there = ring.take();
    }
    const at::Tensor out = seen.out.to(q.scalar_type());
    ctx->save_for_backward({q, own, sight.document_starts, out, seen.lse});
    ctx->saved_data["dropout"] = nn::as_saved(sight.dropout);
    ctx->saved_data["window"] = sight.window;
    comm::save_group(ctx, *group);
    return out;
  }

  static variable_list backward(AutogradContext* ctx,
                                const variable_list& gradients) {
    comm::Group* group = &comm::saved_group(ctx);
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &out = saved[3], &lse = saved[4];
    const nn::Sight sight{saved[2],
                          nn::saved_dropout(ctx->saved_data["dropout"]),
                          ctx->saved_data["window"].toInt()};
    const Pieces mine = pieces_of(group->rank(), group->size());
    const at::Tensor gradient = gradients[0].contiguous();
    const auto wide = q.options().dtype(nn::wide_type(q));
    at::Tensor there = saved[1];
    at::Tensor sums =
        at::zeros(there.sizes(), wide);  // of dk and dv of `there`
    nn::AttentionGradients own{at::zeros(q.sizes(), wide), {}, {}};
    Ring ring(*group), home(*group);
    for (int64_t step = 0; step < group->size(); ++step) {
      const bool last = step + 1 == group->size();
      if (!last) ring.begin(there);
      own.dk = sums[0];
      own.dv = sums[1];
      nn::attend_backward(gradient, q, mine, there[0], there[1],
                          pieces_at(step, *group), sight, out, lse, own);
      if (!last) there = ring.take();
      if (group->size() == 1) break;
      home.begin(sums);
      sums = home.take();
    }
    const auto type = q.scalar_type();
    return {own.dq.to(type), sums[0].to(type), sums[1].to(type), {}, {}};
  }
};

}  // namespace

at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& v, const nn::Sight& sight,
                          comm::Group& group) {
  return RingAttention::apply(q, k, v, sight, &group);
}

at::Tensor gathered_attention(const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, const nn::Sight& sight,
                              comm::Group& group) {
  return nn::piece_attention(q, pieces_of(group.rank(), group.size()),
                             comm::all_gather_with_reduce_scatter(k, 1, group),
                             comm::all_gather_with_reduce_scatter(v, 1, group),
                             pieces_of_all(group.size()), sight);
}

}  // namespace tessera::parallel::context
