#include "tessera/launch/environment.h"

#include <unistd.h>

#include <optional>

#include "tessera/core/error.h"
#include "tessera/launch/detail/hydra_job.h"
#include "tessera/launch/slurm_lists.h"

namespace tessera::launch {
namespace {

// Ports made from a job's name: below the range that the kernel hands out.
constexpr uint64_t kFirstPort = 12000;
constexpr uint64_t kNumPorts = 20000;
// Not of the environment itself: see process_variables().
constexpr const char* kHydraJob = "TESSERA_HYDRA_JOB";

// The variables of one launcher; of several names the first that is set counts.
struct Source {
  std::string name;
  std::vector<std::string> rank;
  std::vector<std::string> world_size;
  std::vector<std::string> local_rank;
  std::vector<std::string> local_world_size;
  std::vector<std::string> node;
};

// Open MPI's NODE_RANK is the rank on the node over all jobs, no node index.
const std::vector<Source>& sources() {
  static const std::vector<Source> sources = {
      {"tessera",
       {"TESSERA_RANK"},
       {"TESSERA_WORLD_SIZE"},
       {"TESSERA_LOCAL_RANK"},
       {"TESSERA_LOCAL_WORLD_SIZE"},
       {"TESSERA_NODE"}},
      {"torchrun",
       {"RANK"},
       {"WORLD_SIZE"},
       {"LOCAL_RANK"},
       {"LOCAL_WORLD_SIZE"},
       {"GROUP_RANK"}},
      {"openmpi",
       {"OMPI_COMM_WORLD_RANK"},
       {"OMPI_COMM_WORLD_SIZE"},
       {"OMPI_COMM_WORLD_LOCAL_RANK"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE"},
       {}},
      {"mpich/pmi",
       {"PMIX_RANK", "PMI_RANK"},
       {"PMI_SIZE", "SLURM_STEP_NUM_TASKS"},
       {"MPI_LOCALRANKID", "SLURM_LOCALID"},
       {"MPI_LOCALNRANKS"},
       {"SLURM_NODEID"}},
      {"slurm",
       {"SLURM_PROCID"},
       {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
       {"SLURM_LOCALID"},
       {},
       {"SLURM_NODEID"}},
  };
  return sources;
}

struct Found {
  std::string name;
  int64_t value = -1;
};

class Reader {
 public:
  explicit Reader(const Variables& variables) : variables_(variables) {}

  const std::string* text(const std::string& name) const {
    auto at = variables_.find(name);
    return at == variables_.end() || at->second.empty() ? nullptr : &at->second;
  }
  bool is_set_to_nothing(const std::string& name) const {
    return variables_.contains(name) && text(name) == nullptr;
  }
  const std::string* first(const std::vector<std::string>& names) const {
    for (const auto& name : names) {
      if (const auto* value = text(name)) return value;
    }
    return nullptr;
  }
  // The first of `names` that is set, as a number.
  std::optional<Found> number(const std::vector<std::string>& names) const {
    for (const auto& name : names) {
      const std::string* value = text(name);
      if (value == nullptr) continue;
      auto parsed = to_number(*value);
      TS_CHECK_CONFIG(parsed.has_value(), "launch: ", name, "='", *value,
                      "' is not a whole number of 0 or more.");
      return Found{name, *parsed};
    }
    return std::nullopt;
  }

 private:
  const Variables& variables_;
};

// srun gives its steps small ids; the script of a batch job and an interactive
// shell have none, or a special one near 2^32.
bool inside_slurm_step(const Reader& read) {
  const std::string* id = read.first({"SLURM_STEP_ID", "SLURM_STEPID"});
  if (id == nullptr) return false;
  auto number = to_number(*id);
  return number.has_value() && *number < 0xfffffff0;
}

const Source* find_source(const Reader& read, std::string& note) {
  for (const Source& source : sources()) {
    if (read.first(source.rank) == nullptr) continue;
    if (source.name == "slurm" && !inside_slurm_step(read)) {
      note =
          "SLURM_PROCID is set, but this is no step of srun: one process. "
          "Start ranks with srun, or with --nproc.";
      return nullptr;
    }
    return &source;
  }
  return nullptr;
}

// How many ranks Slurm put on node `node`, or -1.
int64_t slurm_tasks_on(const Reader& read, int64_t node) {
  const std::string* list =
      read.first({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  if (list == nullptr || node < 0) return -1;
  const auto counts = expand_counts(*list);
  TS_CHECK_CONFIG(node < static_cast<int64_t>(counts.size()),
                  "launch: SLURM_NODEID=", node, " is beyond the ",
                  counts.size(), " nodes of SLURM_STEP_TASKS_PER_NODE='", *list,
                  "'.");
  return counts[node];
}

void check_below(const Found& index, const Found& size) {
  TS_CHECK_CONFIG(index.value < size.value, "launch: ", index.name, "=",
                  index.value, " must be below ", size.name, "=", size.value,
                  ". Each rank needs a number of its own from 0.");
}

void read_places(const Reader& read, const Source& source,
                 RankEnvironment& here) {
  const Found rank = *read.number(source.rank);
  const auto world = read.number(source.world_size);
  TS_CHECK_CONFIG(world.has_value(), "launch: ", rank.name, " is set, but ",
                  source.world_size.front(), " is not. Set both, or neither.");
  check_below(rank, *world);
  here.rank = rank.value;
  here.world_size = world->value;

  const Found unknown;
  const Found node = read.number(source.node).value_or(unknown);
  const Found local = read.number(source.local_rank).value_or(unknown);
  Found locals = read.number(source.local_world_size).value_or(unknown);
  if (locals.value < 0 && inside_slurm_step(read)) {
    locals = {"SLURM_STEP_TASKS_PER_NODE", slurm_tasks_on(read, node.value)};
  }
  here.node = node.value;
  here.local_rank = local.value;
  here.local_world_size = locals.value;
  if (locals.value >= 0) {
    TS_CHECK_CONFIG(locals.value <= world->value, "launch: ", locals.name, "=",
                    locals.value, " is more than ", world->name, "=",
                    world->value, ".");
    if (local.value >= 0) check_below(local, locals);
  }
  if (world->value == 1) {
    here.node = here.local_rank = 0;
    here.local_world_size = 1;
  }
}

uint16_t port_of_number(uint64_t number) {
  return static_cast<uint16_t>(kFirstPort + number % kNumPorts);
}

uint16_t port_of_name(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3;
  return port_of_number(hash);
}

uint16_t slurm_port(const Reader& read) {
  const auto job = read.number({"SLURM_JOB_ID", "SLURM_JOBID"});
  TS_CHECK_CONFIG(job.has_value(),
                  "launch: a step of Slurm without SLURM_JOB_ID. Set "
                  "MASTER_ADDR and MASTER_PORT.");
  const auto step = read.number({"SLURM_STEP_ID", "SLURM_STEPID"});
  // Steps of one job may run side by side on one node.
  return port_of_number(job->value + 7919 * step.value_or(Found{"", 0}).value);
}

uint16_t master_port(const Reader& read, const RankEnvironment& here) {
  const auto port = read.number({"MASTER_PORT"});
  if (!port.has_value() && inside_slurm_step(read)) return slurm_port(read);
  TS_CHECK_CONFIG(port.has_value(), "launch: ", here.source, " gives ",
                  here.world_size,
                  " ranks and MASTER_ADDR, but no "
                  "MASTER_PORT. Set it to a free port of that host.");
  TS_CHECK_CONFIG(port->value > 0 && port->value < 65536,
                  "launch: MASTER_PORT=", port->value,
                  " is no port (1 to 65535).");
  return static_cast<uint16_t>(port->value);
}

void read_tcp(const Reader& read, RankEnvironment& here) {
  Rendezvous& meet = here.rendezvous;
  meet.kind = Rendezvous::Kind::kTcp;
  const std::string* agent = read.text("TORCHELASTIC_USE_AGENT_STORE");
  meet.served_elsewhere =
      here.source == "torchrun" && agent != nullptr && *agent == "True";
  // Each agent counts for itself, and not the hosts that came or went.
  const auto* attempt = read.text("TORCHELASTIC_RESTART_COUNT");
  if (meet.served_elsewhere && attempt != nullptr) meet.attempt = *attempt;
  TS_CHECK_CONFIG(!read.is_set_to_nothing("TESSERA_TOKEN_FILE"),
                  "launch: TESSERA_TOKEN_FILE is set to nothing. Name the file "
                  "of the job's token; or unset it, and whoever reaches "
                  "MASTER_PORT may join.");
  if (const auto* token = read.text("TESSERA_TOKEN_FILE")) {
    meet.token_file = *token;
    TS_CHECK_CONFIG(!meet.served_elsewhere,
                    "launch: TESSERA_TOKEN_FILE=", *token,
                    ": torchrun serves the rendezvous itself, and asks nobody "
                    "for a token. With --rdzv-backend=c10d and "
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 rank 0 serves it.");
  }
  if (const auto* host = read.text("MASTER_ADDR")) {
    meet.host = *host;
    meet.port = master_port(read, here);
    return;
  }
  TS_CHECK_CONFIG(here.source != "torchrun",
                  "launch: RANK and WORLD_SIZE=", here.world_size,
                  " are set, but MASTER_ADDR is not. Set "
                  "MASTER_ADDR and MASTER_PORT to where rank 0 listens.");
  if (inside_slurm_step(read)) {
    const std::string* hosts = read.first(
        {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
    TS_CHECK_CONFIG(hosts != nullptr,
                    "launch: a step of Slurm without SLURM_STEP_NODELIST. Set "
                    "MASTER_ADDR and MASTER_PORT.");
    const bool is_one_node = here.local_world_size == here.world_size;
    const auto names = expand_hosts(*hosts);
    meet.host = is_one_node ? kLoopback : names.front();
    meet.port = slurm_port(read);
    return;
  }
  const std::string* job = read.first({"PMIX_NAMESPACE", kHydraJob});
  TS_CHECK_CONFIG(job != nullptr && here.local_world_size == here.world_size,
                  "launch: ", here.source, " gives ", here.world_size,
                  " ranks, but says not where rank 0 listens. Set MASTER_ADDR "
                  "and MASTER_PORT for all ranks (mpirun -x, mpiexec -genv).");
  meet.host = kLoopback;
  meet.port = port_of_name(*job);
}

void read_rendezvous(const Reader& read, RankEnvironment& here) {
  if (here.world_size == 1) return;
  if (here.source != "tessera") return read_tcp(read, here);
  const std::string* file = read.text("TESSERA_STORE");
  TS_CHECK_CONFIG(file != nullptr,
                  "launch: TESSERA_RANK is set, but TESSERA_STORE is not. "
                  "These variables are set by tessera --nproc alone.");
  here.rendezvous.kind = Rendezvous::Kind::kFile;
  here.rendezvous.file = *file;
}

}  // namespace

Variables process_variables() {
  Variables variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (equals == std::string::npos) continue;
    variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  if (variables.contains("PMI_RANK")) variables[kHydraJob] = hydra_job();
  return variables;
}

std::string RankEnvironment::describe() const {
  if (source == "none") return "one process, no launcher";
  auto known = [](int64_t n) { return n < 0 ? "?" : std::to_string(n); };
  std::string text =
      c10::str("rank ", rank, " of ", world_size, " (", source,
               "), local rank ", known(local_rank), " of ",
               known(local_world_size), " on node ", known(node));
  if (rendezvous.kind == Rendezvous::Kind::kTcp) {
    text += c10::str(", meeting at ", rendezvous.host, ":", rendezvous.port);
  }
  return text;
}

RankEnvironment discover(const Variables& variables) {
  const Reader read(variables);
  RankEnvironment here;
  if (const auto seconds = read.number({"TESSERA_JOIN_TIMEOUT_S"})) {
    TS_CHECK_CONFIG(seconds->value >= 1 && seconds->value <= 86400,
                    "launch: TESSERA_JOIN_TIMEOUT_S=", seconds->value,
                    " is not between 1 and 86400 seconds.");
    here.join_timeout = std::chrono::seconds(seconds->value);
  }
  const Source* source = find_source(read, here.note);
  if (source == nullptr) return here;
  here.source = source->name;
  read_places(read, *source, here);
  read_rendezvous(read, here);
  return here;
}

}  // namespace tessera::launch
