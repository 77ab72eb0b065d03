// What a group makes of a backend that throws at the call.
#include "tessera/comm/base/backend_group.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "tessera/comm/base/histories.h"
#include "tessera/comm/fake/fake_backend.h"
#include "tessera/core/error.h"
#include "tests/support/failure_of.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using testing::failure_of;
using ::testing::HasSubstr;
using ::testing::Not;

class ThrowingBackend final : public fake::FakeBackend {
 public:
  explicit ThrowingBackend(std::exception_ptr thrown)
      : FakeBackend(0, 2), thrown_(std::move(thrown)) {}
  Pending send(Tensors&, int, int) override { std::rethrow_exception(thrown_); }

 private:
  std::exception_ptr thrown_;
};

BackendGroup group_over(std::exception_ptr thrown) {
  return BackendGroup(
      {.name = "pp",
       .backend = "throwing",
       .ranks = {0, 1},
       .rank = 0,
       .timeout = std::chrono::seconds(1)},
      {.backend = c10::make_intrusive<ThrowingBackend>(std::move(thrown))},
      {.verdict = [](const auto&) { return std::string("rank 1 is gone"); },
       .record = [] {}});
}

TEST(BackendGroup, AFailureAtTheCallHasItsVerdict) {
  const c10::SourceLocation here{__func__, __FILE__, __LINE__};
  for (const std::exception_ptr& thrown :
       {std::make_exception_ptr(std::runtime_error("lost")),
        std::make_exception_ptr(c10::DistBackendError(here, "lost")),
        std::make_exception_ptr(Error(ExitCode::kUnreachable, "lost"))}) {
    BackendGroup group = group_over(thrown);
    EXPECT_THAT(failure_of([&] { group.send(at::ones({4}), 1, 0); }),
                AllOf(HasSubstr("send #1 to rank 1"), HasSubstr("lost"),
                      HasSubstr("Verdict: rank 1 is gone")));
    EXPECT_THAT(failure_of([&] { group.barrier(); }),
                HasSubstr("group 'pp' cannot go on"));
  }
}

// Also where the backend names peers that are missing: here none is.
TEST(BackendGroup, RanksThatDifferedHaveTheirVerdict) {
  const GroupInfo info{.name = "dp",
                       .backend = "fake",
                       .ranks = {0, 1},
                       .rank = 0,
                       .timeout = std::chrono::seconds(1)};
  const auto differ = [](const Operation&) {
    throw RanksDiffer({__func__, __FILE__, __LINE__}, "the ranks disagree");
  };
  bool asked = false;
  BackendGroup group(info,
                     {.backend = c10::make_intrusive<fake::FakeBackend>(0, 2),
                      .names_peers = true,
                      .before = differ},
                     {.verdict =
                          [&](const Question& question) {
                            asked = question.ranks_differ;
                            return std::string("rank 1 calls something else");
                          },
                      .record = [] {}});
  EXPECT_THAT(failure_of([&] { group.barrier(); }),
              AllOf(HasSubstr("barrier #1"), HasSubstr("the ranks disagree"),
                    HasSubstr("Verdict: rank 1 calls something else")));
  EXPECT_TRUE(asked);
}

TEST(BackendGroup, ARefusalAtTheCallHasNone) {
  const c10::SourceLocation here{__func__, __FILE__, __LINE__};
  for (const std::exception_ptr& thrown :
       {std::make_exception_ptr(Error(ExitCode::kFailed, "no such tag")),
        std::make_exception_ptr(c10::Error(here, "no such tag")),
        std::make_exception_ptr(c10::ValueError(here, "no such tag"))}) {
    BackendGroup group = group_over(thrown);
    EXPECT_THAT(failure_of([&] { group.send(at::ones({4}), 1, 0); }),
                AllOf(HasSubstr("no such tag"), Not(HasSubstr("Verdict"))));
    EXPECT_EQ(failure_of([&] { group.barrier(); }), "");
    EXPECT_THAT(group.flight_record(),
                AllOf(HasSubstr("send #1"), HasSubstr("refused after")));
  }
}

}  // namespace
}  // namespace tessera::comm
