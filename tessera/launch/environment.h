// Where am I: the rank and its peers, as the environment tells.
//
// Sources, the first hit wins: tessera's own variables (set by run_local),
// torchrun's (RANK ...), Open MPI's, PMIx's and MPICH's PMI, Slurm's, none.
// One source answers all questions, so that two launchers that wrap each other
// are never mixed. Slurm counts only inside a step: an sbatch script itself
// has SLURM_PROCID=0, and is one process.
// Rendezvous: MASTER_ADDR and MASTER_PORT where set; else, for Slurm, the first
//         host of the step and a port made from the job id; for MPI on one
//         host, 127.0.0.1 and a port made from the job's name.
// Errors: variables that are no numbers, contradict each other or are missing
//         are TS_CHECK_CONFIG and named.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>

namespace tessera::launch {

using Variables = std::map<std::string, std::string>;

// Where ranks of one host find each other.
inline constexpr const char* kLoopback = "127.0.0.1";

// The variables of this process; and TESSERA_HYDRA_JOB, where MPICH's mpiexec
// started it, which names a job in no variable.
Variables process_variables();

struct Rendezvous {
  enum class Kind { kNone, kFile, kTcp };  // kNone: a world of one rank
  Kind kind = Kind::kNone;
  std::string file;
  std::string host;
  uint16_t port = 0;
  bool served_elsewhere = false;  // torchrun's agent serves; no rank does
  // Of the agent's store, where a restart must not read old keys; one that rank
  // 0 serves is new each time.
  std::string attempt;
  // TESSERA_TOKEN_FILE; "": whoever reaches the store may use it.
  std::string token_file;
};

struct RankEnvironment {
  int64_t rank = 0;
  int64_t world_size = 1;
  // -1 where the launcher does not say; join() (store.h) then finds out.
  int64_t local_rank = 0;
  int64_t local_world_size = 1;
  int64_t node = 0;
  // "tessera", "torchrun", "openmpi", "mpich/pmi", "slurm", "none"
  std::string source = "none";
  std::string note;  // what was seen and not used, for the log; may be empty
  Rendezvous rendezvous;
  // How long to wait for absent peers. /* = 10 s; TESSERA_JOIN_TIMEOUT_S */
  std::chrono::milliseconds join_timeout = std::chrono::seconds(10);

  std::string describe() const;  // "rank 1 of 4 (torchrun), local 1 of 2 ..."
};

RankEnvironment discover(const Variables& variables);

}  // namespace tessera::launch
