#include <ATen/ATen.h>

#include <numeric>
#include <vector>

#include "tessera/comm/autograd.h"
#include "tessera/core/host_read.h"
#include "tessera/parallel/expert/expert_parallel.h"

namespace tessera::parallel::expert {
namespace {

std::vector<int64_t> to_vector(const at::Tensor& numbers) {
  const at::Tensor flat = numbers.contiguous();
  const int64_t* first = flat.const_data_ptr<int64_t>();
  return {first, first + flat.numel()};
}

// Of rows that come by source, and of each by expert: their places by expert,
// and of each by source. counts: (sources, experts), on the host.
at::Tensor order_by_expert(const at::Tensor& counts) {
  const int64_t sources = counts.size(0), local = counts.size(1);
  const auto numbers = to_vector(counts);
  std::vector<int64_t> begins(numbers.size());
  std::exclusive_scan(numbers.begin(), numbers.end(), begins.begin(),
                      int64_t{0});
  std::vector<int64_t> order;
  order.reserve(std::reduce(numbers.begin(), numbers.end()));
  for (int64_t expert = 0; expert < local; ++expert) {
    for (int64_t source = 0; source < sources; ++source) {
      const int64_t from = source * local + expert;
      for (int64_t i = 0; i < numbers[from]; ++i) {
        order.push_back(begins[from] + i);
      }
    }
  }
  return at::tensor(order, at::kLong);
}

at::Tensor inverse_of(const at::Tensor& order) {
  return at::empty_like(order).scatter_(
      0, order, at::arange(order.numel(), order.options()));
}

}  // namespace

at::Tensor dispatch(const at::Tensor& rows, const at::Tensor& counts,
                    const RunExperts& run, comm::Group& group) {
  const int64_t n = group.size();
  at::Tensor all = at::empty({n, counts.size(0)}, counts.options());
  group.all_gather(all, counts, comm::Mode::kBlocking);
  all = read_on_host(all).view({n, n, -1});  // by source, rank, its experts
  const at::Tensor here = all.select(1, group.rank());
  const auto sent = to_vector(all.select(0, group.rank()).sum(1));
  const auto received = to_vector(here.sum(1));

  const int64_t leave = std::reduce(sent.begin(), sent.end());
  const at::Tensor came =
      comm::all_to_all(leave == rows.size(0) ? rows : rows.narrow(0, 0, leave),
                       group, received, sent);
  const at::Tensor order = order_by_expert(here);
  const at::Tensor sorted = came.index_select(0, order.to(came.device()));
  const at::Tensor outputs = run(sorted, to_vector(here.sum(0)));
  return comm::all_to_all(
      outputs.index_select(0, inverse_of(order).to(came.device())), group, sent,
      received);
}

}  // namespace tessera::parallel::expert
