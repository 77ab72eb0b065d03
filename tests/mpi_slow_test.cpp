// The backend mpi under a real mpirun: every verb on two, three and four ranks,
// and what mpirun and its user see when a rank fails. (CMake's test sets what
// mpirun needs to run as root, and more ranks than cores.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "tessera/comm/communicator.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Ended {
  int code = -1;
  std::string said;
};

Ended run(const std::string& command) {
  Ended ended;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  std::array<char, 4096> buffer{};
  while (fgets(buffer.data(), buffer.size(), pipe) != nullptr) {
    ended.said += buffer.data();
  }
  const int status = pclose(pipe);
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  return ended;
}

class Mpirun : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const BackendInfo& backend : backends()) {
      if (backend.name == "mpi" && !backend.built) {
        GTEST_SKIP() << "needs MPI, which was not built in: " << backend.note;
      }
    }
    unsetenv("GTEST_OUTPUT");  // the ranks would all write that file
  }

  // mpi_ranks lies beside this program.
  static Ended ranks(int count, const std::string& arguments) {
    const char* mpirun = std::getenv("TESSERA_MPIEXEC");  // or in PATH
    const auto program =
        std::filesystem::read_symlink("/proc/self/exe").parent_path() /
        "mpi_ranks";
    Ended ended =
        run(c10::str("timeout -k 5 100 ", mpirun != nullptr ? mpirun : "mpirun",
                     " -np ", count, " ", program.string(), " ", arguments));
    EXPECT_TRUE(ended.code != 0 ||
                ended.said.find("MPI was not ended") == std::string::npos)
        << ended.said;
    return ended;
  }
};

TEST_F(Mpirun, EveryVerbOnTwoThreeAndFourRanks) {
  for (int count : {2, 3, 4}) {
    const Ended ended = ranks(count, "");
    EXPECT_EQ(ended.code, 0) << count << " ranks: " << ended.said;
    EXPECT_THAT(ended.said, HasSubstr("1 test suite ran"))
        << "nothing was tested";
  }
}

TEST_F(Mpirun, ATimeOutNamesTheOperation) {
  const Ended ended = ranks(2, "time_out");
  EXPECT_EQ(ended.code, 3) << ended.said;
  EXPECT_THAT(
      ended.said,
      AllOf(HasSubstr("[rank 0/2] all_reduce(sum) #1 float32[2, 3] on group "
                      "'world' (2 ranks, mpi): timed out"),
            HasSubstr("group 'world' cannot go on")));
}

TEST_F(Mpirun, AMessageThatDoesNotFitIsNamed) {
  for (auto [fault, said] :
       {std::pair{"sends_less", "rank 0 sent 12 bytes, but 16 are received"},
        {"sends_more", "rank 0 sent more than the 16 bytes"}}) {
    const Ended ended = ranks(2, fault);
    EXPECT_EQ(ended.code, 3) << ended.said;
    EXPECT_THAT(ended.said, AllOf(HasSubstr("[rank 1/2] recv #1 from rank 0"),
                                  HasSubstr(said)));
  }
}

TEST_F(Mpirun, RanksThatDifferInWhatTheyReduceAreNamed) {
  const Ended ended = ranks(3, "misordered");
  EXPECT_EQ(ended.code, 3) << ended.said;
  EXPECT_THAT(
      ended.said,
      AllOf(HasSubstr("the ranks disagree: their first 128 collectives on this "
                      "group are not the same"),
            HasSubstr("ranks 0, 2 call all_reduce(sum) #1 float32[4]; rank 1 "
                      "calls all_reduce(max) #1 float32[4]")));
}

TEST_F(Mpirun, ARankThatIsKilledEndsAll) {
  const Ended ended = ranks(3, "killed");
  EXPECT_NE(ended.code, 0);
  EXPECT_NE(ended.code, 124) << "the others went on: " << ended.said;
  EXPECT_THAT(ended.said, HasSubstr("9"));
}

TEST_F(Mpirun, TheFailingRanksMessageAndCodeReachTheUser) {
  const Ended ended = ranks(3, "fails");
  EXPECT_EQ(ended.code, 78) << ended.said;
  EXPECT_THAT(ended.said,
              AllOf(HasSubstr("[rank 1/3] boom"), Not(HasSubstr("MPI_ABORT"))));
}

TEST_F(Mpirun, AProgramMayStartAndEndMpiItself) {
  const Ended ended = ranks(2, "own_mpi");
  EXPECT_EQ(ended.code, 0) << ended.said;
}

TEST_F(Mpirun, AnotherNumberingIsRefused) {
  const Ended ended = ranks(2, "other_number");
  EXPECT_EQ(ended.code, 78) << ended.said;
  EXPECT_THAT(ended.said, AllOf(HasSubstr("MPI says that this is rank 0 of 2, "
                                          "but it was started as rank 1 of 2"),
                                HasSubstr("mpirun -np 2")));
}

}  // namespace
}  // namespace tessera::comm
