#include <ATen/ATen.h>

#include <vector>

#include "tessera/comm/autograd.h"
#include "tessera/parallel/expert/expert_parallel.h"

namespace tessera::parallel::expert {
namespace {

// Of rows that come by source, and of each by expert: their places by expert,
// and of each by source. counts: (sources, experts), on the host.
at::Tensor order_by_expert(const at::Tensor& counts) {
  const int64_t sources = counts.size(0), local = counts.size(1);
  const at::Tensor expert = at::arange(local, counts.options())
                                .repeat({sources})
                                .repeat_interleave(counts.flatten());
  return at::argsort(expert, /*stable=*/true, /*dim=*/0,
                     /*descending=*/false);
}

at::Tensor inverse_of(const at::Tensor& order) {
  return at::empty_like(order).scatter_(
      0, order, at::arange(order.numel(), order.options()));
}

std::vector<int64_t> to_vector(const at::Tensor& numbers) {
  const at::Tensor flat = numbers.contiguous();
  const int64_t* first = flat.const_data_ptr<int64_t>();
  return {first, first + flat.numel()};
}

}  // namespace

at::Tensor dispatch(const at::Tensor& rows, const at::Tensor& counts,
                    const nn::Experts& experts, comm::Group& group) {
  const int64_t n = group.size();
  at::Tensor all = at::empty({n, counts.size(0)}, counts.options());
  group.all_gather(all, counts, comm::Mode::kBlocking);
  all = all.to(at::kCPU).view({n, n, -1});  // by source, rank, its experts
  const at::Tensor here = all.select(1, group.rank());
  const auto sent = to_vector(all.select(0, group.rank()).sum(1));
  const auto received = to_vector(here.sum(1));

  const at::Tensor came = comm::all_to_all(rows, group, received, sent);
  const at::Tensor order = order_by_expert(here);
  const at::Tensor sorted = came.index_select(0, order.to(came.device()));
  const at::Tensor outputs = experts.forward(sorted, to_vector(here.sum(0)));
  return comm::all_to_all(
      outputs.index_select(0, inverse_of(order).to(came.device())), group, sent,
      received);
}

}  // namespace tessera::parallel::expert
