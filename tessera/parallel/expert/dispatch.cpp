#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "tessera/comm/autograd.h"
#include "tessera/core/device.h"
#include "tessera/core/host_read.h"
#include "tessera/mesh/layout.h"
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

// Some of the experts that each rank has, by their number there; and the rows
// that go to them, by rank.
struct Chunk {
  mesh::Range experts;
  std::vector<int64_t> sent, received;
  at::Tensor here;  // received, by source and expert

  // The rows of each expert here.
  std::vector<int64_t> splits(int64_t experts_here) const {
    std::vector<int64_t> all(experts_here, 0);
    std::ranges::copy(to_vector(here.sum(0)), all.begin() + experts.begin);
    return all;
  }
};

// counts: by source, rank and its experts, on the host.
std::vector<Chunk> chunks_of(const at::Tensor& counts, int64_t chunks,
                             int64_t rank) {
  std::vector<Chunk> all;
  for (const mesh::Range& range : expert_chunks(counts.size(2), chunks)) {
    const at::Tensor of = counts.narrow(2, range.begin, range.size());
    const at::Tensor here = of.select(1, rank);
    all.push_back({.experts = range,
                   .sent = to_vector(of.select(0, rank).sum(1)),
                   .received = to_vector(here.sum(1)),
                   .here = here});
  }
  return all;
}

// What experts make of rows that came by source, in their order.
at::Tensor run_sorted(const at::Tensor& came, const Chunk& chunk,
                      int64_t experts_here, const RunExperts& run) {
  const at::Tensor order = order_by_expert(chunk.here);
  const at::Tensor sorted = came.index_select(0, sent_to(order, came.device()));
  const at::Tensor outputs = run(sorted, chunk.splits(experts_here));
  return outputs.index_select(0, sent_to(inverse_of(order), came.device()));
}

// Rows of each rank's experts in turn -> by chunk, of each by rank; and back.
std::vector<at::Tensor> by_chunk(const at::Tensor& rows,
                                 const std::vector<Chunk>& chunks) {
  std::vector<int64_t> sizes;
  for (size_t rank = 0; rank < chunks[0].sent.size(); ++rank) {
    for (const Chunk& chunk : chunks) sizes.push_back(chunk.sent[rank]);
  }
  const auto parts = rows.split_with_sizes(sizes);
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < chunks.size(); ++i) {
    std::vector<at::Tensor> own;
    for (size_t at = i; at < parts.size(); at += chunks.size()) {
      own.push_back(parts[at]);
    }
    all.push_back(at::cat(own));
  }
  return all;
}

at::Tensor by_rank(const std::vector<at::Tensor>& rows,
                   const std::vector<Chunk>& chunks) {
  std::vector<std::vector<at::Tensor>> parts;
  for (size_t i = 0; i < chunks.size(); ++i) {
    parts.push_back(rows[i].split_with_sizes(chunks[i].sent));
  }
  std::vector<at::Tensor> all;
  for (size_t rank = 0; rank < chunks[0].sent.size(); ++rank) {
    for (const auto& of_chunk : parts) all.push_back(of_chunk[rank]);
  }
  return at::cat(all);
}

// Autograd runs the youngest first: what is begun here before others is awaited
// behind them there, and the other way round.
at::Tensor dispatch_in_chunks(const at::Tensor& rows,
                              const std::vector<Chunk>& chunks,
                              int64_t experts_here, const RunExperts& run,
                              comm::Group& group,
                              const std::function<void()>& beside) {
  std::vector<comm::Travelling> leaving, returning;
  auto parts = by_chunk(rows, chunks);
  for (size_t i = 0; i < chunks.size(); ++i) {
    leaving.push_back(comm::start_all_to_all(std::exchange(parts[i], {}), group,
                                             chunks[i].received,
                                             chunks[i].sent));
  }
  if (beside) beside();
  for (size_t i = 0; i < chunks.size(); ++i) {
    const at::Tensor came =
        comm::finish_all_to_all(std::exchange(leaving[i], {}));
    returning.push_back(
        comm::start_all_to_all(run_sorted(came, chunks[i], experts_here, run),
                               group, chunks[i].sent, chunks[i].received));
  }
  std::vector<at::Tensor> home;
  for (auto& rows_of : returning) {
    home.push_back(comm::finish_all_to_all(std::exchange(rows_of, {})));
  }
  return by_rank(home, chunks);
}

}  // namespace

at::Tensor dispatch(const at::Tensor& given, const at::Tensor& counts,
                    const RunExperts& run, comm::Group& group,
                    const DispatchOptions& options) {
  const int64_t n = group.size();
  at::Tensor all = at::empty({n, counts.size(0)}, counts.options());
  // Where it was given up, what is there is nothing.
  group.all_gather(all, counts, comm::Mode::kBlocking).synchronize();
  all = read_on_host(all).view({n, n, -1});  // by source, rank, its experts
  const int64_t experts_here = all.size(2);
  const auto sent = to_vector(all.select(0, group.rank()));
  const int64_t leave = std::reduce(sent.begin(), sent.end());
  const at::Tensor rows =
      leave == given.size(0) ? given : given.narrow(0, 0, leave);
  if (options.chunks > 0) {
    return dispatch_in_chunks(rows,
                              chunks_of(all, options.chunks, group.rank()),
                              experts_here, run, group, options.beside);
  }
  const Chunk whole = chunks_of(all, 1, group.rank()).front();
  const at::Tensor came =
      comm::all_to_all(rows, group, whole.received, whole.sent);
  return comm::all_to_all(run_sorted(came, whole, experts_here, run), group,
                          whole.sent, whole.received);
}

}  // namespace tessera::parallel::expert
