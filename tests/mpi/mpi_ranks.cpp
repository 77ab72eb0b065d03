// One rank under mpirun: the tests of tests/mpi_slow_test.cpp, which starts it.
//
// mpi_ranks [gtest flags]   the verbs, on every rank alike
// mpi_ranks CASE            one that ends in its own way; see cases()
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <thread>

#include "tessera/comm/mpi/mpi_backend.h"
#include "tessera/core/error.h"
#include "tessera/launch/environment.h"
#include "tessera/launch/store.h"
#include "tests/support/failure_of.h"
#include "tests/support/verbs.h"

namespace tessera::comm {
namespace {

std::unique_ptr<Communicator> ranks;
c10::intrusive_ptr<c10d::Store> store;

void join(std::chrono::milliseconds timeout) {
  const launch::Meeting meeting =
      launch::join(launch::discover(launch::process_variables()));
  const auto& place = meeting.environment;
  rank_context() = {.rank = static_cast<int>(place.rank),
                    .world_size = static_cast<int>(place.world_size)};
  store = meeting.store;
  ranks = make_communicator({.backend = "mpi",
                             .rank = place.rank,
                             .world_size = place.world_size,
                             .local_world_size = place.local_world_size,
                             .store = meeting.store,
                             .timeout = timeout});
}

TEST(Mpi, Reduces) { testing::expect_reductions(*ranks); }
TEST(Mpi, Moves) { testing::expect_moves(*ranks); }
TEST(Mpi, PassesMessages) { testing::expect_messages(*ranks); }
TEST(Mpi, RunsSequences) { testing::expect_sequences(*ranks); }

TEST(Mpi, ReducesBools) {
  Group& world = ranks->world();
  const auto bools = [](std::vector<int64_t> values) {
    return at::tensor(values).to(at::kBool);
  };
  const at::Tensor mine = bools({world.rank() == 0, 1, 0});
  at::Tensor all = mine.clone(), any = mine.clone();
  world.all_reduce(all, ReduceOp::kMin).wait();
  world.all_reduce(any, ReduceOp::kMax).wait();
  EXPECT_TRUE(at::equal(all, bools({0, 1, 0})));
  EXPECT_TRUE(at::equal(any, bools({1, 1, 0})));
}

TEST(Mpi, NanWinsInMinAndMax) {
  Group& world = ranks->world();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      at::Tensor t = at::full({3}, world.rank() == 1 ? nan : 1.0, dtype);
      world.all_reduce(t, op).wait();
      EXPECT_TRUE(t.isnan().all().item<bool>());
    }
  }
}

// Halves are summed in fp32: at 8192, fp16 has steps of 8.
TEST(Mpi, RoundsHalvesOnce) {
  Group& world = ranks->world();
  at::Tensor t = at::full({2}, world.rank() == 0 ? 8192 : 3, at::kHalf);
  world.all_reduce(t).wait();
  const double sum = 8192 + 3.0 * static_cast<double>(world.size() - 1);
  EXPECT_TRUE(at::equal(t, at::full({2}, sum, at::kHalf)));
}

// A group whose calls count to 7 at most, as those of MPI do to INT_MAX.
c10::intrusive_ptr<c10d::Backend> small_counts() {
  const Group& world = ranks->world();
  return mpi::connect({store, "small/"}, {.group = "small",
                                          .rank = world.rank(),
                                          .ranks = world.ranks(),
                                          .world_size = world.size(),
                                          .timeout = std::chrono::minutes(1),
                                          .largest_count = 7})
      .backend;
}

TEST(Mpi, SharesOutLargeCounts) {
  const int64_t size = ranks->world_size(), rank = ranks->rank();
  const auto backend = small_counts();
  const auto mine = [](int64_t r) { return at::arange(40.0).add(r * 100); };
  std::vector<at::Tensor> tensors{mine(rank)};
  backend->allreduce(tensors)->wait();
  const double all = static_cast<double>(size * (size - 1)) / 2 * 100;
  EXPECT_TRUE(at::equal(tensors[0], at::arange(40.0).mul(size).add(all)));

  at::Tensor input = at::arange(static_cast<double>(15 * size)).add(rank);
  at::Tensor output = at::empty({15});
  backend->_reduce_scatter_base(output, input)->wait();
  const at::Tensor sum = at::arange(static_cast<double>(15 * size))
                             .mul(size)
                             .add(size * (size - 1) / 2);
  EXPECT_TRUE(at::equal(output, sum.narrow(0, 15 * rank, 15)));

  at::Tensor gathered = at::empty({40 * size});
  at::Tensor piece = mine(rank);
  backend->_allgather_base(gathered, piece)->wait();
  EXPECT_TRUE(at::equal(gathered.narrow(0, 40, 40), mine(1)));

  tensors = {mine(rank)};
  backend->broadcast(tensors, {.rootRank = 1})->wait();
  EXPECT_TRUE(at::equal(tensors[0], mine(1)));
}

// The forms of c10d that groups do not use.
TEST(Mpi, HasTheFormsOfC10d) {
  const int64_t size = ranks->world_size(), rank = ranks->rank();
  const auto backend = small_counts();
  const auto one_each = [&](double value) {
    std::vector<at::Tensor> list;
    for (int64_t r = 0; r < size; ++r) list.push_back(at::full({3}, value));
    return list;
  };
  std::vector<at::Tensor> mine{at::full({3}, rank + 1.0)};
  std::vector<std::vector<at::Tensor>> lists{one_each(0)};
  backend->allgather(lists, mine)->wait();
  EXPECT_EQ(lists[0][1][0].item<double>(), 2);

  lists = {one_each(0)};
  backend->gather(lists, mine, {.rootRank = 1})->wait();
  EXPECT_EQ(lists[0][0][2].item<double>(), rank == 1 ? 1 : 0);

  std::vector<at::Tensor> out{at::zeros({3})};
  lists = {one_each(rank)};
  backend->scatter(out, lists, {.rootRank = 1})->wait();
  EXPECT_EQ(out[0][1].item<double>(), 1);
  backend->reduce_scatter(out, lists)->wait();
  EXPECT_EQ(out[0][1].item<double>(), size * (size - 1) / 2);

  c10d::ReduceOptions to_one;
  to_one.rootRank = 1;
  backend->reduce(mine, to_one)->wait();
  EXPECT_EQ(mine[0][0].item<double>(),
            rank == 1 ? size * (size + 1) / 2 : rank + 1);

  std::vector<at::Tensor> in = one_each(rank), all = one_each(0);
  backend->alltoall(all, in)->wait();
  EXPECT_EQ(all[1][0].item<double>(), 1);
}

// Lists may be strided, and are refused where they do not fit; what MPI itself
// is given is dense.
TEST(Mpi, TakesNoStridedTensorForADenseOne) {
  const int64_t size = ranks->world_size(), rank = ranks->rank();
  const auto backend = small_counts();
  const auto column = [](double value) {
    return at::stack({at::full({3}, value), at::full({3}, -1.0)}, 1)
        .select(1, 0);
  };
  std::vector<at::Tensor> mine{column(rank + 1.0)};
  std::vector<std::vector<at::Tensor>> lists(1);
  for (int64_t r = 0; r < size; ++r) lists[0].push_back(column(0));
  backend->allgather(lists, mine)->wait();
  for (int64_t r = 0; r < size; ++r) {
    EXPECT_TRUE(at::equal(lists[0][r], at::full({3}, r + 1.0)));
  }
  c10d::ReduceOptions to_one;
  to_one.rootRank = 0;
  backend->reduce(mine, to_one)->wait();
  const double sum = rank == 0 ? size * (size + 1) / 2.0 : rank + 1.0;
  EXPECT_TRUE(at::equal(mine[0], at::full({3}, sum)));

  EXPECT_THAT(testing::failure_of([&] { backend->allreduce(mine); }),
              ::testing::HasSubstr("mpi carries contiguous CPU tensors"));
  lists[0].pop_back();
  EXPECT_THAT(testing::failure_of([&] { backend->allgather(lists, mine); }),
              ::testing::HasSubstr("Give one for each rank"));
}

TEST(Mpi, ReceivesFromAnySource) {
  const int64_t size = ranks->world_size();
  const auto backend = small_counts();
  std::vector<at::Tensor> t{at::full({100}, ranks->rank())};
  if (ranks->rank() > 0) backend->send(t, 0, 5)->wait();
  if (ranks->rank() > 0) return;
  std::vector<bool> seen(size);
  for (int64_t i = 1; i < size; ++i) {
    const auto work = backend->recvAnysource(t, 5);
    work->wait();
    EXPECT_EQ(t[0][99].item<int64_t>(), work->sourceRank());
    seen[work->sourceRank()] = true;
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), true), size - 1);
}

// What `action` fails with, to the launcher.
int fail_with(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 3;
  }
  return 0;
}

// Rank 1 receives four elements; rank 0 sends three, or five.
int sends(int64_t numel) {
  join(std::chrono::seconds(30));
  if (ranks->rank() == 0) ranks->world().send(at::ones({numel}), 1, 7).wait();
  if (ranks->rank() == 0) pause();  // until mpirun ends it
  return fail_with([] { ranks->world().recv(at::ones({4}), 0, 7).wait(); });
}

int sends_less() { return sends(3); }
int sends_more() { return sends(5); }

int time_out() {
  join(std::chrono::milliseconds(300));
  at::Tensor t = at::ones({2, 3});
  if (ranks->rank() > 0) {
    pause();  // until mpirun ends it
    return 0;
  }
  fail_with([&] { ranks->world().all_reduce(t).wait(); });
  return fail_with([] { ranks->world().barrier(); });
}

int killed() {
  join(std::chrono::seconds(30));
  at::Tensor t = at::ones({1000000});
  ranks->world().all_reduce(t).wait();
  if (ranks->rank() == 1) std::raise(SIGKILL);
  while (true) ranks->world().all_reduce(t).wait();
}

int fails() {
  join(std::chrono::seconds(30));
  const auto own = std::move(ranks);  // ends with the exception, as in main()
  own->world().barrier();
  TS_CHECK_CONFIG(own->rank() != 1, "boom");
  own->world().barrier();
  return 0;
}

// Rank 1 takes a maximum where the others sum.
int misordered() {
  join(std::chrono::seconds(30));
  return fail_with([] {
    Group& world = ranks->world();
    world.all_reduce(at::ones({4}),
                     world.rank() == 1 ? ReduceOp::kMax : ReduceOp::kSum);
    while (true) world.barrier();
  });
}

// A program that starts and ends MPI, and has it for itself in between, at the
// lowest level that is allowed.
int own_mpi() {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
  join(std::chrono::seconds(30));
  at::Tensor t = at::ones({4});
  ranks->world().all_reduce(t).wait();
  const bool summed =
      at::equal(t, at::full({4}, static_cast<double>(ranks->world_size())));
  ranks.reset();
  // Open MPI's constants are casts of this kind.
  // NOLINTNEXTLINE(bugprone-casting-through-void)
  for (int i = 0; i < 100; ++i) MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
  // The progress thread lives on, without a call of MPI.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  return summed ? 0 : 3;
}

// Rank 0 of the world asks to be another one.
int other_number() {
  auto place = launch::discover(launch::process_variables());
  place.rank = place.world_size - 1 - place.rank;
  const launch::Meeting meeting = launch::join(place);
  make_communicator({.backend = "mpi",
                     .rank = place.rank,
                     .world_size = place.world_size,
                     .local_world_size = place.world_size,
                     .store = meeting.store});
  return 0;
}

const std::map<std::string, int (*)()>& cases() {
  static const std::map<std::string, int (*)()> all = {
      {"sends_less", sends_less}, {"sends_more", sends_more},
      {"time_out", time_out},     {"killed", killed},
      {"fails", fails},           {"misordered", misordered},
      {"own_mpi", own_mpi},       {"other_number", other_number}};
  return all;
}

int run(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  if (argc > 1) return cases().at(argv[1])();
  join(std::chrono::seconds(60));
  const int code = RUN_ALL_TESTS();
  ranks.reset();
  return code;
}

}  // namespace
}  // namespace tessera::comm

int main(int argc, char** argv) {
  try {
    return tessera::comm::run(argc, argv);
  } catch (const tessera::Error& error) {
    std::cerr << error.what_without_backtrace() << std::endl;
    return static_cast<int>(error.exit_code());
  }
}
