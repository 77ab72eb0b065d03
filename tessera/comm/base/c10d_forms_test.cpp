// Every form over shm, on threads, with lists of strided, empty and uneven
// tensors; and what it refuses.
#include "tessera/comm/base/c10d_forms.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/comm/shm/shm_backend.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;
using Tensors = C10dForms::Tensors;
using TensorLists = C10dForms::TensorLists;

class C10dFormsTest : public ::testing::TestWithParam<int> {
 protected:
  // Runs `body` on each rank; the first exception fails the test.
  void run(const std::function<void(C10dForms&)>& body) const {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<int64_t> ranks(GetParam());
    std::iota(ranks.begin(), ranks.end(), 0);
    std::mutex mutex;
    std::vector<std::string> failures;
    {
      std::vector<std::jthread> threads;
      for (const int64_t rank : ranks) {
        threads.emplace_back([&, rank] {
          shm::ShmBackend backend(Rendezvous(store, "test"),
                                  {.group = "test",
                                   .rank = rank,
                                   .ranks = ranks,
                                   .ranks_on_host = GetParam(),
                                   .timeout = std::chrono::seconds(20)});
          try {
            body(backend);
          } catch (const std::exception& error) {
            backend.fail(message_of(error));
            std::lock_guard lock(mutex);
            failures.push_back(message_of(error));
          }
        });
      }
    }
    EXPECT_THAT(failures, ::testing::IsEmpty());
  }

  // One tensor a rank, rank + 1 everywhere; rank 1's is empty.
  static Tensors uneven(int size) {
    Tensors list;
    for (int rank = 0; rank < size; ++rank) {
      list.push_back(at::full({2, rank == 1 ? 0 : rank + 1}, rank + 1.0));
    }
    return list;
  }

  // Room for `list`, strided.
  static Tensors room_for(const Tensors& list) {
    Tensors room;
    for (const at::Tensor& tensor : list) {
      room.push_back(at::empty({tensor.size(1), tensor.size(0)}).t());
    }
    return room;
  }
};

void expect_same(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(at::equal(actual[i], expected[i])) << "tensor " << i;
  }
}

at::Tensor sum_of_ranks(int size) {
  return at::full({}, size * (size + 1) / 2.);
}

TEST_P(C10dFormsTest, AllGatherOfAList) {
  run([](C10dForms& group) {
    const Tensors all = uneven(group.getSize());
    TensorLists out{room_for(all)};
    Tensors in{all[group.getRank()]};
    const auto work = group.allgather(out, in, {});
    work->wait();
    expect_same(out[0], all);
    expect_same(work->result(), all);
    expect_same(work->getFuture()->value().toTensorVector(), all);
  });
}

TEST_P(C10dFormsTest, GatherAndScatter) {
  run([](C10dForms& group) {
    const Tensors all = uneven(group.getSize());
    const int root = group.getSize() - 1;
    const bool is_root = group.getRank() == root;
    c10d::GatherOptions to;
    to.rootRank = root;
    TensorLists out;
    if (is_root) out.push_back(room_for(all));
    Tensors in{all[group.getRank()]};
    group.gather(out, in, to)->wait();
    if (is_root) expect_same(out[0], all);

    c10d::ScatterOptions from;
    from.rootRank = root;
    TensorLists lists;
    if (is_root) lists.push_back(all);
    Tensors own = room_for(in);
    group.scatter(own, lists, from)->wait();
    expect_same(own, in);
  });
}

TEST_P(C10dFormsTest, ReduceLeavesTheOthersTensors) {
  run([](C10dForms& group) {
    Tensors tensors{at::full({3, 2}, group.getRank() + 1.0).t()};
    group.reduce(tensors, {})->wait();
    const at::Tensor expected = group.getRank() == 0
                                    ? sum_of_ranks(group.getSize())
                                    : at::full({}, group.getRank() + 1.0);
    expect_same(tensors, {expected.expand({2, 3})});
  });
}

TEST_P(C10dFormsTest, ReduceScatterOfAList) {
  run([](C10dForms& group) {
    const Tensors all = uneven(group.getSize());
    TensorLists in{all};
    Tensors out = room_for({all[group.getRank()]});
    c10d::ReduceScatterOptions mean;
    mean.reduceOp = c10d::ReduceOp::AVG;
    group.reduce_scatter(out, in, mean)->wait();
    expect_same(out, {all[group.getRank()]});
  });
}

TEST_P(C10dFormsTest, AllToAllOfLists) {
  run([](C10dForms& group) {
    Tensors in = uneven(group.getSize());
    const at::Tensor own = in[group.getRank()];
    Tensors out = room_for(Tensors(group.getSize(), own));
    group.alltoall(out, in, {})->wait();
    expect_same(out, Tensors(group.getSize(), own));
  });
}

TEST_P(C10dFormsTest, CoalescedForms) {
  run([](C10dForms& group) {
    const int size = group.getSize();
    const double rank = group.getRank();
    Tensors sums{at::full({2, 3}, rank + 1).t(), at::full({0}, rank)};
    group.allreduce_coalesced(sums, {})->wait();
    expect_same(sums, {sum_of_ranks(size).expand({3, 2}), at::empty({0})});

    Tensors in{at::full({2}, rank), at::full({1}, 10 + rank)};
    TensorLists lists;
    for (int r = 0; r < size; ++r) {
      lists.push_back({at::empty({2}), at::empty({1})});
    }
    Tensors flat{at::empty({2 * size}), at::empty({size})};
    group.allgather_coalesced(lists, in, {})->wait();
    group.allgather_into_tensor_coalesced(flat, in, {})->wait();
    for (int r = 0; r < size; ++r) {
      expect_same(lists[r], {at::full({2}, r), at::full({1}, 10 + r)});
      expect_same({flat[0].narrow(0, 2 * r, 2)}, {at::full({2}, r)});
      expect_same({flat[1].narrow(0, r, 1)}, {at::full({1}, 10 + r)});
    }
    Tensors out{at::empty({2}), at::empty({1})};
    group.reduce_scatter_tensor_coalesced(out, flat, {})->wait();
    expect_same(out, {in[0] * size, in[1] * size});
  });
}

TEST_P(C10dFormsTest, SumOfSparseTensors) {
  run([](C10dForms& group) {
    const int rank = group.getRank();  // which has `rank` elements
    const at::Tensor indices = at::arange(rank, at::kLong).unsqueeze(0);
    Tensors sparse{at::sparse_coo_tensor(indices, at::ones({rank, 2}), {9, 2})};
    at::Tensor expected = at::zeros({9, 2});
    for (int r = 0; r < group.getSize(); ++r) expected.narrow(0, 0, r).add_(1);
    group.allreduce_sparse(sparse, {})->wait();
    expect_same({sparse[0].to_dense()}, {expected});
  });
}

TEST_P(C10dFormsTest, MayRequireGradients) {
  run([](C10dForms& group) {
    const at::Tensor own = at::ones({2}).requires_grad_();
    TensorLists out(1);
    for (int r = 0; r < group.getSize(); ++r) {
      out[0].push_back(at::zeros({2}).requires_grad_());
    }
    Tensors in{own};
    group.allgather(out, in, {})->wait();
    EXPECT_TRUE(out[0][0].is_leaf());
    expect_same(out[0], Tensors(group.getSize(), at::ones({2})));
  });
}

TEST_P(C10dFormsTest, RefusesListsThatDoNotFit) {
  run([](C10dForms& group) {
    const auto refusal = [](const auto& call) -> std::string {
      try {
        call();
      } catch (const Error& error) {
        return message_of(error);
      }
      return "nothing";
    };
    const int size = group.getSize();
    Tensors one{at::ones({2})};
    TensorLists short_list{Tensors(size + 1, one[0])};
    EXPECT_THAT(refusal([&] { group.allgather(short_list, one, {}); }),
                HasSubstr(c10::str("all_gather: a list of ", size + 1)));
    TensorLists other_dtype{Tensors(size, at::ones({2}, at::kInt))};
    EXPECT_THAT(refusal([&] { group.allgather(other_dtype, one, {}); }),
                HasSubstr("of one dtype"));
    TensorLists other_size{Tensors(size, at::ones({3}))};
    EXPECT_THAT(refusal([&] { group.reduce_scatter(one, other_size, {}); }),
                HasSubstr("reduce_scatter: this rank's tensor has 2 elements"));
    group.barrier({})->wait();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, C10dFormsTest, ::testing::Values(2, 3, 4));

}  // namespace
}  // namespace tessera::comm
