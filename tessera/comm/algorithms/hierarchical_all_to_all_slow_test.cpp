// all_to_all over several hosts, in each of its forms: beside shared memory,
// and by the messages that leave a rank.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <numeric>
#include <optional>
#include <random>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/comm/algorithms/hierarchical.h"
#include "tessera/comm/base/rendezvous.h"
#include "tessera/comm/gloo/gloo_backend.h"
#include "tessera/comm/shm/shm_backend.h"
#include "tessera/core/error.h"
#include "tests/support/layouts.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;
using testing::on_hosts;
using testing::on_one_host;

using Row = std::vector<int64_t>;
// Rows from each rank to each, which every rank of a test knows.
using Matrix = std::vector<Row>;

std::mt19937_64 seeded(uint64_t seed) { return std::mt19937_64(seed); }

// Some ranks have nothing for some, or for anybody; some rows are many.
Matrix any_matrix(int64_t ranks, std::mt19937_64& random) {
  const uint64_t kind = random() % 6;
  const uint64_t most = kind < 3 ? 5 : kind == 3 ? 300 : 30000;
  Matrix rows(ranks, Row(ranks, 0));
  if (kind == 0 && random() % 2 == 0) return rows;  // nobody has any
  const auto busy = static_cast<int64_t>(random() % ranks);
  for (int64_t from = 0; from < ranks; ++from) {
    for (int64_t to = 0; to < ranks; ++to) {
      const uint64_t drawn = random();
      const bool none = kind == 1   ? from != busy
                        : kind == 2 ? to != busy
                                    : drawn % 3 == 0;
      rows[from][to] = none ? 0 : static_cast<int64_t>((drawn >> 8) % most);
    }
  }
  return rows;
}

Row column_of(const Matrix& rows, int64_t to) {
  Row column;
  for (const Row& row : rows) column.push_back(row[to]);
  return column;
}

int64_t sum(const Row& row) {
  return std::accumulate(row.begin(), row.end(), int64_t{0});
}

// Rows of three that tell who sent them, and which.
at::Tensor input_of(const Matrix& rows, int64_t rank, at::ScalarType dtype) {
  const int64_t numel = sum(rows[rank]) * 3;
  return at::arange(numel, at::kLong)
      .add(rank * 37)
      .remainder(120)
      .to(dtype)
      .view({-1, 3});
}

struct Sent {
  at::Tensor output;
  Work work;
};

Sent sent(Group& group, const Matrix& rows, at::ScalarType dtype) {
  const Row gets = column_of(rows, group.rank());
  at::Tensor output = at::full({sum(gets), 3}, 121, dtype);
  return {output, group.all_to_all(output, input_of(rows, group.rank(), dtype),
                                   gets, rows[group.rank()])};
}

void expect_same(Group& tested, Group& plain, const Matrix& rows,
                 at::ScalarType dtype, int call) {
  Sent one = sent(tested, rows, dtype), other = sent(plain, rows, dtype);
  one.work.wait();
  other.work.wait();
  EXPECT_TRUE(at::equal(one.output, other.output))
      << "call " << call << " of " << dtype;
}

// A rank's communicator over shared memory, beside the one under test.
std::unique_ptr<Communicator> plain_beside(
    const Communicator& tested, const c10::intrusive_ptr<c10d::Store>& store) {
  CommunicatorOptions options = on_one_host("shm", tested.world_size(), "auto");
  options.rank = tested.rank();
  options.store = store;
  return make_communicator(options);
}

using Named = std::tuple<std::string, std::string>;  // hosts, algorithm

class AllToAllOnHosts : public ::testing::TestWithParam<Named> {
 protected:
  static CommunicatorOptions options() {
    const auto& [hosts, algorithm] = GetParam();
    return on_hosts(hosts, algorithm);
  }
};

TEST_P(AllToAllOnHosts, GivesTheBitsOfOneHost) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_threads(options(), [&](Communicator& tested) {
    const auto plain = plain_beside(tested, store);
    std::mt19937_64 random = seeded(11);
    for (int call = 0; call < 60; ++call) {
      const Matrix rows = any_matrix(tested.world_size(), random);
      const at::ScalarType dtype =
          std::array{at::kDouble, at::kFloat, at::kBFloat16, at::kLong,
                     at::kByte}
              .at(random() % 5);
      expect_same(tested.world(), plain->world(), rows, dtype, call);
    }
  });
}

// Two groups of all ranks and one of some, each with calls under way.
TEST_P(AllToAllOnHosts, ServesSeveralGroupsAtOnce) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_threads(options(), [&](Communicator& tested) {
    const auto plain = plain_beside(tested, store);
    const int64_t world = tested.world_size();
    std::vector<int64_t> all(world), some;
    std::iota(all.begin(), all.end(), 0);
    for (int64_t rank = 0; rank < world; ++rank) {
      if (rank != 1) some.push_back(rank);
    }
    std::vector<std::pair<Group*, Group*>> groups;
    for (const auto& [name, ranks] :
         std::vector<std::pair<std::string, std::vector<int64_t>>>{
             {"one", all}, {"two", all}, {"some", some}}) {
      Group* group = tested.make_group(ranks, name);
      Group* same = plain->make_group(ranks, name);
      if (group != nullptr) groups.emplace_back(group, same);
    }
    std::mt19937_64 random = seeded(13);
    std::vector<std::pair<Sent, Sent>> calls;
    for (int round = 0; round < 6; ++round) {
      const Matrix of_all = any_matrix(world, random);
      const Matrix of_some = any_matrix(world - 1, random);
      for (const auto& [group, same] : groups) {
        const Matrix& rows = group->size() == world ? of_all : of_some;
        calls.emplace_back(sent(*group, rows, at::kFloat),
                           sent(*same, rows, at::kFloat));
      }
    }
    for (size_t i = calls.size(); i-- > 0;) {
      auto& [one, other] = calls[i];
      one.work.wait();
      other.work.wait();
      EXPECT_TRUE(at::equal(one.output, other.output)) << "call " << i;
    }
  });
}

class AllToAllOfFewer : public AllToAllOnHosts {};

TEST_P(AllToAllOfFewer, EndsWhenARankFails) {
  const auto& hosts = std::get<0>(GetParam());
  std::atomic<size_t> told = 0;
  try {
    run_threads(options(), [&](Communicator& communicator) {
      Group& world = communicator.world();
      world.barrier();
      TS_CHECK(communicator.rank() != 1, "boom");
      const Matrix rows(hosts.size(), Row(hosts.size(), 4));
      try {
        sent(world, rows, at::kFloat).work.wait();
      } catch (const Error& error) {
        EXPECT_THAT(error.what_without_backtrace(), HasSubstr("all_to_all #2"));
        ++told;
      }
    });
    ADD_FAILURE() << "nobody failed";
  } catch (const Error& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("boom"));
  }
  EXPECT_EQ(told, hosts.size() - 1);
}

TEST_P(AllToAllOfFewer, NamesWhoDoesNotCome) {
  const auto& hosts = std::get<0>(GetParam());
  CommunicatorOptions late = options();
  late.timeout = std::chrono::seconds(1);
  std::latch others(static_cast<std::ptrdiff_t>(hosts.size()) - 1);
  run_threads(late, [&](Communicator& communicator) {
    Group& world = communicator.world();
    world.barrier();
    if (communicator.rank() == 1) return others.wait();
    const Matrix rows(hosts.size(), Row(hosts.size(), 4));
    try {
      sent(world, rows, at::kFloat).work.wait();
      ADD_FAILURE() << "rank " << communicator.rank() << " waited for nobody";
    } catch (const Error& error) {
      EXPECT_THAT(
          error.what_without_backtrace(),
          ::testing::AllOf(HasSubstr("all_to_all #2"), HasSubstr("rank 1")));
    }
    others.count_down();
  });
}

std::string name_of_case(const ::testing::TestParamInfo<Named>& info) {
  return std::get<0>(info.param) + "_" + std::get<1>(info.param);
}

auto algorithms_of_hosts() {
  return ::testing::Values("hierarchical", "straight", "aggregated");
}

INSTANTIATE_TEST_SUITE_P(All, AllToAllOnHosts,
                         ::testing::Combine(::testing::Values("aabb", "abab",
                                                              "abba", "aabbcc",
                                                              "aaabbb", "aab"),
                                            algorithms_of_hosts()),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Those, AllToAllOfFewer,
                         ::testing::Combine(::testing::Values("aabb"),
                                            algorithms_of_hosts()),
                         name_of_case);

// A backend's messages, with a count of those that it sent.
class Counting : public c10d::Backend {
 public:
  explicit Counting(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  using Tensors = std::vector<at::Tensor>;
  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int peer,
                                      int tag) override {
    ++messages_;
    return inner_->send(tensors, peer, tag);
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int peer,
                                      int tag) override {
    return inner_->recv(tensors, peer, tag);
  }
  int64_t messages() const { return messages_; }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
  int64_t messages_ = 0;
};

// The messages that a rank sends between hosts in one all_to_all.
int64_t messages_of(const Matrix& rows, const HostMap& map, int64_t rank,
                    const algorithms::Chooser& choose,
                    const c10::intrusive_ptr<c10d::Store>& store) {
  const auto timeout = std::chrono::seconds(30);
  const auto size = static_cast<int64_t>(rows.size());
  const Connection gloo = gloo::make_gloo_backend(
      Rendezvous(store, "across/"), {.rank = static_cast<int>(rank),
                                     .size = static_cast<int>(size),
                                     .address = "127.0.0.1",
                                     .timeout = timeout});
  const auto counting = c10::make_intrusive<Counting>(gloo.backend);
  const auto inside = c10::make_intrusive<shm::ShmBackend>(
      Rendezvous(store, c10::str("host-", map.host, "/")),
      shm::Place{.group = "inside",
                 .rank = map.local,
                 .ranks = map.locals(),
                 .ranks_on_host = size,
                 .timeout = timeout});
  const Connection tested =
      algorithms::make_hierarchical({.map = map,
                                     .inside = {.backend = inside},
                                     .across = {.backend = counting}},
                                    choose);
  Row gets = column_of(rows, rank), gives = rows[rank];
  at::Tensor in = input_of(rows, rank, at::kByte);
  at::Tensor out = at::empty({sum(gets), 3}, at::kByte);
  tested.backend->alltoall_base(out, in, gets, gives, {})->wait();
  const int64_t messages = counting->messages();
  tested.backend->barrier({})->wait();  // nobody leaves before
  return messages;
}

// By the rule: where a host's bytes for a rank are few, one rank takes them.
int64_t expected_messages(const Matrix& rows, const HostMap& map, int64_t rank,
                          int64_t border_bytes) {
  int64_t messages = 0;
  for (int64_t to = 0; to < static_cast<int64_t>(rows.size()); ++to) {
    const auto place = map.place_of(to);
    if (place.host == map.host) continue;
    int64_t of_host = 0;
    for (int64_t local : map.locals()) of_host += rows[local][to];
    const bool aggregated = of_host * 3 <= border_bytes;
    messages += aggregated ? of_host > 0 && place.local == map.local
                           : rows[rank][to] > 0;
  }
  return messages;
}

// On `names`, whose hosts each have as many; `choose` keeps to `border_bytes`.
void expect_messages(const std::string& names, const Matrix& rows,
                     int64_t border_bytes, const algorithms::Chooser& choose,
                     std::optional<int64_t> wanted) {
  SCOPED_TRACE(c10::str(names, " up to ", border_bytes));
  std::vector<std::string> hosts;
  for (char name : names) hosts.emplace_back(1, name);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto ranks = static_cast<int64_t>(rows.size());
  run_threads(ranks, "shm", [&](Communicator& communicator) {
    const int64_t rank = communicator.rank();
    const auto map = make_host_map(hosts, rank);
    const int64_t expected = expected_messages(rows, map, rank, border_bytes);
    EXPECT_EQ(messages_of(rows, map, rank, choose, store), expected);
    EXPECT_EQ(wanted.value_or(expected), expected);
  });
}

// Each of 6 ranks has 4 rows of 3 bytes for each but the last, for whom it has
// more.
Matrix with_more_for_the_last(int64_t rows_of_last) {
  Matrix rows(6, Row(6, 4));
  for (Row& row : rows) row[5] = rows_of_last;
  return rows;
}

TEST(HierarchicalAllToAll, SendsAsFewMessagesAsItsFormSays) {
  constexpr int64_t kNever = -1, kAlways = int64_t{1} << 40;
  for (const auto& [names, border, wanted] :
       std::vector<std::tuple<std::string, int64_t, std::optional<int64_t>>>{
           {"aabbcc", kNever, 4},  // (H - 1) L
           {"aabbcc", kAlways, 2},
           {"aaabbb", kNever, 3},
           {"aaabbb", kAlways, 1},
           {"abcabc", kAlways, 2},
           {"aabbcc", 2 * 4 * 3, std::nullopt},  // those of all but the last
           {"aabbcc", 2 * 4 * 3 - 1, 4}}) {
    const auto choose = [border = border](Verb, int64_t bytes) {
      return bytes <= border ? algorithms::Algorithm::kAggregated
                             : algorithms::Algorithm::kStraight;
    };
    expect_messages(names, with_more_for_the_last(50), border, choose, wanted);
  }
}

TEST(HierarchicalAllToAll, GoesBySizeWhereNoTableSays) {
  const auto nothing = [](Verb, int64_t) {
    return algorithms::Algorithm::kOwn;
  };
  constexpr int64_t kBorder = 512 << 10;
  for (int64_t more : {kBorder / 6, kBorder / 6 + 1}) {
    expect_messages("aabbcc", with_more_for_the_last(more), kBorder, nothing,
                    std::nullopt);
  }
}

}  // namespace
}  // namespace tessera::comm
