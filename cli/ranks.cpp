#include "cli/ranks.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "cli/flag_values.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/broken_pipe.h"
#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/core/screen.h"
#include "tessera/launch/cores.h"
#include "tessera/launch/local.h"
#include "tessera/launch/signals.h"
#include "tessera/launch/store.h"
#include "tessera/monitor/memory.h"

namespace tessera::cli {
namespace {

std::chrono::milliseconds timeout_of(const comm::CommConfig& comm) {
  return std::chrono::seconds(comm.timeout_s);
}

std::chrono::milliseconds silence_of(const comm::CommConfig& comm) {
  return std::chrono::seconds(comm.silence_s);
}

std::unique_ptr<monitor::DeviceMemory> memory_of(c10::DeviceType device) {
  if (device == c10::kCPU) return nullptr;
  return std::make_unique<monitor::DeviceMemory>();
}

// Whether this process has begun to meet its peers.
bool meets = false;

std::unique_ptr<comm::Communicator> connect(const RankJob& job,
                                            const launch::Meeting& meeting) {
  const auto& place = meeting.environment;
  launch::take_cores(job.threads, place.local_world_size);
  monitor::count_tensor_bytes();
  if (place.source != "none") log::info(place.describe());
  return comm::make_communicator({.backend = job.comm.backend,
                                  .algorithm = job.comm.algorithm,
                                  .rank = place.rank,
                                  .world_size = place.world_size,
                                  .local_world_size = place.local_world_size,
                                  .devices = job.devices,
                                  .store = meeting.store,
                                  .timeout = timeout_of(job.comm),
                                  .silence = silence_of(job.comm),
                                  .address = meeting.address,
                                  .record_folder = job.record_folder});
}

// This process is one rank; its peers are elsewhere. Where another launcher
// started it, the first rank of each host does what --nproc does before it
// starts any.
int run_rank(const RankJob& job, const launch::RankEnvironment& environment) {
  meets = true;
  const launch::Meeting meeting = launch::join(environment);
  const auto& place = meeting.environment;
  std::optional<RankContextGuard> guard;
  std::unique_ptr<comm::Communicator> ranks;
  const auto begin = [&] {
    guard.emplace(
        RankContext{.rank = static_cast<int>(place.rank),
                    .world_size = static_cast<int>(place.world_size)});
    take_device(job.devices.at(place.rank), place.local_rank);
    ranks = connect(job, meeting);
    // Until here a signal ends the process: of ranks that meet, one that only
    // took note would wait for those that it ended.
    job.on_start();
  };
  if (place.source == "tessera" || place.source == "none") {
    begin();
  } else {
    launch::begin_together(meeting, [&] { job.prepare(place); }, begin);
  }
  const auto memory = memory_of(job.devices.at(place.rank));
  return job.work(*ranks);
}

// All ranks are threads of this process.
int run_rank_threads(const RankJob& job, int64_t world_size) {
  job.on_start();
  std::vector<int> codes(world_size, static_cast<int>(ExitCode::kFailed));
  monitor::count_tensor_bytes();
  comm::run_threads({.backend = job.comm.backend,
                     .algorithm = job.comm.algorithm,
                     .world_size = world_size,
                     .local_world_size = world_size,
                     .devices = job.devices,
                     .timeout = timeout_of(job.comm),
                     .record_folder = job.record_folder},
                    [&](comm::Communicator& ranks) {
                      const monitor::RankMemory memory;
                      launch::take_cores(job.threads, world_size);
                      const auto there =
                          memory_of(job.devices.at(ranks.rank()));
                      codes[ranks.rank()] = job.work(ranks);
                    });
  return codes[0];
}

int run_with_restarts(const RankJob& job, int64_t world_size) {
  const Restarts& restarts = job.restarts;
  if (restarts.most == 0) return run_rank_processes(job.arguments, world_size);
  const std::string first = restarts.progress();
  std::string newest = first;
  int64_t in_a_row = 0;
  while (true) {
    bool was_asked = false;
    const int code =
        run_rank_processes(newest == first ? job.arguments : restarts.arguments,
                           world_size, &was_asked);
    if (was_asked || !may_go_better(code)) return code;
    if (const std::string now = restarts.progress(); now != newest) {
      newest = now;
      in_a_row = 0;
    }
    if (++in_a_row <= restarts.most) {
      show_on_screen(c10::str("tessera: all ranks are started again, ",
                              in_a_row, " of ", restarts.most,
                              " times without a new checkpoint\n"));
      continue;
    }
    const auto failed = c10::str("all ranks were started again ", restarts.most,
                                 " times in a row without a new checkpoint");
    const int64_t fewer = restarts.fewer(world_size, newest != first);
    if (fewer == 0) {
      show_on_screen(c10::str("tessera: ended: ", failed, "\n"));
      return code;
    }
    show_on_screen(c10::str("tessera: ", failed, ": ", fewer,
                            " ranks go on in place of ", world_size, "\n"));
    world_size = fewer;
    in_a_row = 0;
  }
}

}  // namespace

void add_rank_flags(CLI::App& command, RankFlags& flags) {
  command.add_option("--nproc", flags.nproc, "ranks to start on this host")
      ->check(whole_number(1, 4096));
  command.add_option("--ranks", flags.ranks, "processes or threads")
      ->check(CLI::IsMember({"processes", "threads"}));
}

launch::RankEnvironment find_place(const RankFlags& flags) {
  auto place = launch::discover(launch::process_variables());
  const bool is_rank = place.source != "none";
  TS_CHECK_USAGE(!is_rank || flags.nproc == 0 || place.source == "tessera",
                 "--nproc starts ranks, but ", place.source,
                 " has started them already. Leave --nproc out.");
  TS_CHECK_USAGE(!is_rank || flags.ranks != "threads",
                 "--ranks threads: ", place.source,
                 " has started ranks, which are processes. Leave it out.");
  return place;
}

bool may_go_better(int code) {
  constexpr ExitCode kAgainTheSame[] = {ExitCode::kOk, ExitCode::kUsage,
                                        ExitCode::kInputOutput,
                                        ExitCode::kStopped, ExitCode::kConfig};
  return std::ranges::none_of(kAgainTheSame, [&](ExitCode each) {
    return code == static_cast<int>(each);
  });
}

void replace_flag(std::vector<std::string>& arguments, const std::string& flag,
                  const std::string& value) {
  for (size_t i = 1; i < arguments.size(); ++i) {
    std::string& word = arguments[i];
    if (arguments[i - 1] == flag) word = value;
    if (word.starts_with(flag + "=")) word = flag + "=" + value;
  }
}

int run_rank_processes(std::vector<std::string> arguments, int64_t world_size,
                       bool* was_asked) {
  arguments.at(0) = "/proc/self/exe";
  launch::LocalOptions options{
      .nproc = world_size, .argv = arguments, .was_asked = was_asked};
  // What CUDA's driver has done is of no use to a copy.
  if (!has_cuda()) {
    options.as_copy = [&] {
      std::vector<char*> argv;
      for (auto& each : arguments) argv.push_back(each.data());
      argv.push_back(nullptr);
      return run_program(static_cast<int>(arguments.size()), argv.data());
    };
  }
  return launch::run_local(options);
}

int run_ranks(const RankJob& job, const RankFlags& flags,
              const launch::RankEnvironment& place, int64_t world_size) {
  ignore_broken_pipes();  // who reads along may stop before the ranks do
  std::optional<launch::TidyUp> tidy;
  if (job.tidy) tidy.emplace(job.tidy);
  if (place.source != "none") return run_rank(job, place);
  TS_CHECK_CONFIG(world_size == 1 || job.comm.backend != "mpi",
                  "comm.backend is mpi, whose ranks are started by mpirun. "
                  "Use mpirun -np ",
                  world_size, " tessera ", job.arguments.at(1),
                  " ..., without --nproc.");
  job.comm.check_gpus(job.devices, num_gpus());
  launch::RankEnvironment first = place;
  first.world_size = first.local_world_size = world_size;
  job.prepare(first);
  if (world_size == 1 && job.restarts.most == 0) return run_rank(job, place);
  if (flags.ranks == "threads") return run_rank_threads(job, world_size);
  tidy.reset();  // a launcher takes signals itself, and returns
  return run_with_restarts(job, world_size);
}

void run_as_rank(const std::function<void()>& command) {
  try {
    command();
  } catch (const std::exception& error) {
    if (meets) throw;
    try {
      launch::refuse(launch::discover(launch::process_variables()), error);
    } catch (const Error& none) {
      log::debug("it is no rank that others wait for: ", message_of(none));
    }
    throw;
  }
}

}  // namespace tessera::cli
