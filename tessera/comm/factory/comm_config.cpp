#include "tessera/comm/comm_config.h"

#include "tessera/comm/algorithms/collectives.h"
#include "tessera/comm/algorithms/tuning_table.h"
#include "tessera/comm/nccl/gpus.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// Why this build cannot carry it, or "".
std::string reason_against(const std::string& backend) {
  for (const BackendInfo& info : backends()) {
    if (info.name == backend && !info.built) return info.note;
  }
  return "";
}

}  // namespace

void check_tuning_table() { algorithms::TuningTable::from_environment(); }

std::vector<std::string> algorithm_choices() {
  auto choices = algorithms::algorithm_names();
  choices.emplace_back("hierarchical");
  return choices;
}

void CommConfig::declare(config::Section& section) {
  section
      .key("backend", backend,
           "what carries the collectives; auto: shm inside one host, between "
           "hosts gloo, and nccl for tensors of GPUs where every rank has one "
           "of its own; nccl: refused where one has not; mpi: the ranks that "
           "mpirun started")
      .one_of({"auto", "shm", "gloo", "mpi", "nccl"})
      .check([is_of_this_build = is_of_this_build](const config::Value& value) {
        return is_of_this_build ? reason_against(std::get<std::string>(value))
                                : "";
      });
  section
      .key("algorithm", algorithm,
           "how a collective goes through its ranks; auto: hierarchical over "
           "several hosts, else what TESSERA_COMM_TABLE has for its size, else "
           "the backend's own; straight, aggregated: hierarchical, and between "
           "hosts every all_to_all in that form")
      .one_of(algorithm_choices());
  section
      .key("timeout_s", timeout_s,
           "seconds after which an operation that waits for a peer fails")
      .at_least(1)
      .at_most(7 * 24 * 3600);
  section
      .key("silence_s", silence_s,
           "seconds after which a rank that is stopped, gone without a word, "
           "or on a host that is cut off, counts as lost, whoever waits for "
           "it, at least 2; 0: timeout_s says when")
      .at_least(0)
      .at_most(7 * 24 * 3600);
}

void CommConfig::check_gpus(const std::vector<c10::DeviceType>& devices,
                            int64_t num_gpus) const {
  if (backend != "nccl") return;
  std::string against = nccl::against_devices(devices);
  if (against.empty()) {
    std::vector<std::string> gpus;
    for (size_t rank = 0; rank < devices.size(); ++rank) {
      gpus.push_back(c10::str("GPU ", rank % num_gpus, " of the ", num_gpus,
                              " of this host"));
    }
    against = nccl::against_sharing(gpus);
  }
  TS_CHECK_CONFIG(against.empty(), "comm.backend is nccl: ", against);
}

}  // namespace tessera::comm
