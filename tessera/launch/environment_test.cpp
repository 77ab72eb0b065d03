#include "tessera/launch/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/launch/slurm_lists.h"

namespace tessera::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

const Variables kTorchrun = {{"RANK", "3"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "1"},
                             {"GROUP_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "alpha"},
                             {"MASTER_PORT", "29500"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"OMPI_COMM_WORLD_NODE_RANK", "7"},
                            {"PMIX_RANK", "1"},
                            {"PMIX_NAMESPACE", "prterun-alpha-17@1"}};
const Variables kHydra = {{"PMI_RANK", "0"},        {"PMI_SIZE", "2"},
                          {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"},
                          {"MASTER_ADDR", "alpha"}, {"MASTER_PORT", "1234"}};
const Variables kSlurm = {{"SLURM_PROCID", "8"},
                          {"SLURM_STEP_ID", "0"},
                          {"SLURM_STEP_NUM_TASKS", "9"},
                          {"SLURM_NTASKS", "64"},
                          {"SLURM_LOCALID", "0"},
                          {"SLURM_NODEID", "2"},
                          {"SLURM_STEP_TASKS_PER_NODE", "4(x2),1"},
                          {"SLURM_STEP_NODELIST", "gpu[07-08,11]"},
                          {"SLURM_JOB_ID", "4711"}};
const Variables kTessera = {
    {"TESSERA_RANK", "1"},       {"TESSERA_WORLD_SIZE", "2"},
    {"TESSERA_LOCAL_RANK", "1"}, {"TESSERA_LOCAL_WORLD_SIZE", "2"},
    {"TESSERA_NODE", "0"},       {"TESSERA_STORE", "/proc/self/fd/9"}};

struct Case {
  const char* what;
  Variables variables;
  const char* source;
  std::array<int64_t, 5> places;  // rank, world, local rank, local world, node
  Rendezvous::Kind kind;
  const char* where;  // host:port or file
};

TEST(Environment, FindsItsPlaceUnderEveryLauncher) {
  using Kind = Rendezvous::Kind;
  const std::vector<Case> cases = {
      {"nothing", {}, "none", {0, 1, 0, 1, 0}, Kind::kNone, ""},
      {"torchrun",
       kTorchrun,
       "torchrun",
       {3, 4, 1, 2, 1},
       Kind::kTcp,
       "alpha:29500"},
      {"by hand",
       {{"RANK", "1"},
        {"WORLD_SIZE", "2"},
        {"MASTER_ADDR", "::1"},
        {"MASTER_PORT", "5"}},
       "torchrun",
       {1, 2, -1, -1, -1},
       Kind::kTcp,
       "::1:5"},
      {"one rank needs no meeting",
       {{"RANK", "0"}, {"WORLD_SIZE", "1"}},
       "torchrun",
       {0, 1, 0, 1, 0},
       Kind::kNone,
       ""},
      {"Open MPI on one host",
       kOpenMpi,
       "openmpi",
       {1, 2, 1, 2, -1},
       Kind::kTcp,
       "127.0.0.1:30636"},
      {"Open MPI told where",
       with(kOpenMpi, {{"MASTER_ADDR", "beta"}, {"MASTER_PORT", "77"}}),
       "openmpi",
       {1, 2, 1, 2, -1},
       Kind::kTcp,
       "beta:77"},
      {"MPICH",
       kHydra,
       "mpich/pmi",
       {0, 2, 0, 1, -1},
       Kind::kTcp,
       "alpha:1234"},
      {"MPICH on one host",
       {{"PMI_RANK", "1"},
        {"PMI_SIZE", "2"},
        {"MPI_LOCALRANKID", "1"},
        {"MPI_LOCALNRANKS", "2"},
        {"TESSERA_HYDRA_JOB", "hydra-77"}},
       "mpich/pmi",
       {1, 2, 1, 2, -1},
       Kind::kTcp,
       "127.0.0.1:31320"},
      {"srun --mpi=pmix",
       with(kSlurm, {{"PMIX_RANK", "8"}}),
       "mpich/pmi",
       {8, 9, 0, 1, 2},
       Kind::kTcp,
       "gpu07:16711"},
      {"Slurm", kSlurm, "slurm", {8, 9, 0, 1, 2}, Kind::kTcp, "gpu07:16711"},
      {"Slurm on one node, whose name nobody needs",
       with(kSlurm, {{"SLURM_NODEID", "0"},
                     {"SLURM_STEP_TASKS_PER_NODE", "9"},
                     {"SLURM_STEP_NODELIST", "gpu07"}}),
       "slurm",
       {8, 9, 0, 9, 0},
       Kind::kTcp,
       "127.0.0.1:16711"},
      {"a second step beside it",
       with(kSlurm, {{"SLURM_STEP_ID", "1"}}),
       "slurm",
       {8, 9, 0, 1, 2},
       Kind::kTcp,
       "gpu07:24630"},
      {"an sbatch script is no step",
       {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "64"}},
       "none",
       {0, 1, 0, 1, 0},
       Kind::kNone,
       ""},
      {"nor is an interactive shell",
       with(kSlurm, {{"SLURM_STEP_ID", "4294967290"}}),
       "none",
       {0, 1, 0, 1, 0},
       Kind::kNone,
       ""},
      {"own ranks inside a torchrun",
       with(kTorchrun, kTessera),
       "tessera",
       {1, 2, 1, 2, 0},
       Kind::kFile,
       "/proc/self/fd/9"},
      {"torchrun inside a step",
       with(kSlurm, kTorchrun),
       "torchrun",
       {3, 4, 1, 2, 1},
       Kind::kTcp,
       "alpha:29500"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    const RankEnvironment here = discover(c.variables);
    EXPECT_EQ(here.source, c.source);
    EXPECT_THAT((std::array{here.rank, here.world_size, here.local_rank,
                            here.local_world_size, here.node}),
                ::testing::ElementsAreArray(c.places));
    EXPECT_EQ(here.rendezvous.kind, c.kind);
    const Rendezvous& meet = here.rendezvous;
    EXPECT_EQ(c.kind == Rendezvous::Kind::kTcp
                  ? meet.host + ":" + std::to_string(meet.port)
                  : meet.file,
              c.where);
  }
}

TEST(Environment, SaysWhatItSawAndDidNotUse) {
  EXPECT_THAT(discover({{"SLURM_PROCID", "0"}}).note, HasSubstr("no step"));
  EXPECT_EQ(discover({}).note, "");
}

TEST(Environment, FollowsTheAgentOfTorchrun) {
  const auto here =
      discover(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                {"TORCHELASTIC_RESTART_COUNT", "2"}}));
  EXPECT_TRUE(here.rendezvous.served_elsewhere);
  EXPECT_EQ(here.rendezvous.attempt, "2");
}

TEST(Environment, AStoreOfRank0IsTheSameWhateverTheAgentsCount) {
  const auto here =
      discover(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"},
                                {"TORCHELASTIC_RESTART_COUNT", "2"}}));
  EXPECT_FALSE(here.rendezvous.served_elsewhere);
  EXPECT_EQ(here.rendezvous.attempt, "");
}

TEST(Environment, TakesTheTokenOfTheJobOverTcpAlone) {
  const Variables token = {{"TESSERA_TOKEN_FILE", "/run/token"}};
  EXPECT_EQ(discover(with(kTorchrun, token)).rendezvous.token_file,
            "/run/token");
  EXPECT_EQ(discover(with(kTessera, token)).rendezvous.token_file, "");
}

TEST(Environment, RefusesContradictionsByName) {
  struct Wrong {
    Variables variables;
    const char* message;
  };
  const std::vector<Wrong> table = {
      {{{"RANK", "0"}}, "RANK is set, but WORLD_SIZE is not"},
      {with(kTorchrun, {{"RANK", "4"}}), "RANK=4 must be below WORLD_SIZE=4"},
      {with(kTorchrun, {{"RANK", "-1"}}), "RANK='-1' is not a whole number"},
      {with(kTorchrun, {{"RANK", "1x"}}), "RANK='1x' is not a whole number"},
      {with(kTorchrun, {{"WORLD_SIZE", "99999999999999999999"}}),
       "WORLD_SIZE='99999999999999999999'"},
      {with(kTorchrun, {{"LOCAL_RANK", "2"}}),
       "LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2"},
      {with(kTorchrun, {{"LOCAL_WORLD_SIZE", "5"}}),
       "LOCAL_WORLD_SIZE=5 is more than WORLD_SIZE=4"},
      {with(kTorchrun, {{"MASTER_PORT", ""}}), "no MASTER_PORT"},
      {with(kTorchrun, {{"MASTER_PORT", "65536"}}), "MASTER_PORT=65536"},
      {with(kTorchrun, {{"MASTER_ADDR", ""}}), "MASTER_ADDR is not"},
      {with(kHydra, {{"MASTER_ADDR", ""}}), "says not where rank 0 listens"},
      {with(kSlurm, {{"SLURM_NODEID", "3"}}), "SLURM_NODEID=3 is beyond the 3"},
      {with(kSlurm, {{"SLURM_JOB_ID", ""}}), "SLURM_JOB_ID"},
      {with(kSlurm, {{"SLURM_STEP_NODELIST", "gpu[1-"}}), "no list of hosts"},
      {with(kTessera, {{"TESSERA_STORE", ""}}), "TESSERA_STORE is not"},
      {with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                        {"TESSERA_TOKEN_FILE", "/run/token"}}),
       "TESSERA_TOKEN_FILE=/run/token: torchrun serves the rendezvous itself"},
      {with(kTorchrun, {{"TESSERA_TOKEN_FILE", ""}}),
       "TESSERA_TOKEN_FILE is set to nothing"},
      {{{"TESSERA_JOIN_TIMEOUT_S", "0"}}, "TESSERA_JOIN_TIMEOUT_S=0"},
  };
  for (const Wrong& wrong : table) {
    SCOPED_TRACE(wrong.message);
    try {
      discover(wrong.variables);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr(wrong.message));
    }
  }
}

TEST(Environment, ExpandsSlurmsLists) {
  EXPECT_THAT(expand_hosts("n[1-3,07],login"),
              ElementsAre("n1", "n2", "n3", "n07", "login"));
  EXPECT_THAT(expand_hosts("r[1-2]n[09-10]-ib"),
              ElementsAre("r1n09-ib", "r1n10-ib", "r2n09-ib", "r2n10-ib"));
  EXPECT_THAT(expand_counts("4(x2),1"), ElementsAre(4, 4, 1));
  for (const char* bad :
       {"", "n[", "n]", "n[3-1]", "n[1-99999999999]", "a,,b",
        "n[1-9999]m[1-9999]", "n[a-b]", "n[1][1][1][1][1][1][1][1][1]"}) {
    EXPECT_THROW(expand_hosts(bad), Error) << bad;
  }
  for (const char* bad : {"", "4(x", "4(x)", "x", "4(x9999999999)", "4,"}) {
    EXPECT_THROW(expand_counts(bad), Error) << bad;
  }
}

}  // namespace
}  // namespace tessera::launch
