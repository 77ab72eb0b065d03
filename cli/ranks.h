// How a command's ranks are started: as processes or threads of this host, or
// by another launcher, of whose ranks this process is one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>

#include "cli/commands.h"
#include "tessera/comm/comm_config.h"
#include "tessera/launch/environment.h"

namespace tessera::cli {

struct RankFlags {
  int64_t nproc = 0;  // 0: as many as the mesh asks for
  std::string ranks = "processes";
};

void add_rank_flags(CLI::App& command, RankFlags& flags);

// Where this process is. TS_CHECK_USAGE on --nproc below another launcher.
launch::RankEnvironment find_place(const RankFlags& flags);

// Of ranks that are processes of this host: all are started again where one has
// failed.
struct Restarts {
  int64_t most = 0;  // in a row, while `progress` says the same
  std::function<std::string()> progress = nullptr;
  // When these have failed, of so many ranks: how many are tried next, as often
  // again; 0: it is over. `progressed`: there was any since the start.
  std::function<int64_t(int64_t ranks, bool progressed)> fewer =
      [](int64_t, bool) { return 0; };
  // The command's, once it has said something new; else as they were.
  std::vector<std::string> arguments = {};
};

struct RankJob {
  comm::CommConfig comm;
  std::vector<c10::DeviceType> devices;  // of every rank, in their order
  int64_t threads = 0;                   // of a rank; 0: the cores, shared out
  std::string record_folder = "";        // of flight recorders; "": none
  // Once a host, before its ranks start: what they share. `first`: where the
  // first of them is.
  std::function<void(const launch::RankEnvironment& first)> prepare =
      [](const auto&) {};
  // In every process with ranks, before them.
  std::function<void()> on_start = [] {};
  // What a rank does: its exit code.
  std::function<int(comm::Communicator&)> work;
  // Of the command, for the ranks that are started with it.
  std::vector<std::string> arguments = {};
  Restarts restarts = {};
  // Removes what a signal that ends this process would leave; may be empty.
  std::function<void()> tidy = {};
};

// The exit code. REQUIRES: `place` of find_place(); world_size is its, where it
// is a rank's.
int run_ranks(const RankJob& job, const RankFlags& flags,
              const launch::RankEnvironment& place, int64_t world_size);

// Whether ranks that ended with this code may go better when they are started
// again: not where they were done or stopped, or would be refused again.
bool may_go_better(int code);

// Starts ranks as processes of this same command. The exit code.
// `was_asked`: see launch::LocalOptions.
int run_rank_processes(std::vector<std::string> arguments, int64_t world_size,
                       bool* was_asked = nullptr);

// Of a command line on which the flag stands: with this value, for ranks that
// are started with it.
void replace_flag(std::vector<std::string>& arguments, const std::string& flag,
                  const std::string& value);

// Runs a command that calls run_ranks(). What ends it before then is told to
// the ranks that another launcher started with it.
void run_as_rank(const std::function<void()>& command);

}  // namespace tessera::cli
