// A rank's way to its peers: makes groups over one backend.
//
// The members of a group make it, those that are in several in the same order;
// a rank that is not a member may ask too, and gets nullptr. Its destructor
// frees all that it opened: nothing stays in /dev/shm, no port, no file.
// Comm:    making one, and make_group(), meet at the store.
// Errors:  TS_CHECK_CONFIG on options that no backend serves, TS_CHECK_REACH
//          where a peer does not come in time, TS_CHECK on ranks that are not
//          ascending.
// Threads: one thread at a time may call it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/comm/group.h"

namespace tessera::comm {

struct CommunicatorOptions {
  // auto | shm | gloo | mpi | nccl | fake. nccl: tensors of GPUs go over it,
  // those of the CPU as with auto.
  std::string backend = "auto";
  // As comm.algorithm has it. auto: over several hosts hierarchical, else as
  // the table says that TESSERA_COMM_TABLE names, else the backend's own.
  std::string algorithm = "auto";
  int64_t rank = 0;  // global
  int64_t world_size = 1;
  int64_t local_world_size = 1;  // ranks on this host; shm needs all of them
  // What each rank computes on; empty: the CPU, all of them. auto takes nccl
  // where every rank has a GPU of its own. A rank of a GPU has taken it
  // (core/device.h).
  std::vector<c10::DeviceType> devices = {};
  // Where ranks find each other: HashStore among threads, FileStore among the
  // processes of one host, TCPStore across hosts. Unused with one rank.
  c10::intrusive_ptr<c10d::Store> store = {};
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  // After which a rank that is stopped, on a host that is cut off, or gone
  // without having closed its communicator, counts as lost, whoever waits for
  // it: all operations of groups fail. 0: by `timeout` alone, which also limits
  // how long ranks wait to meet.
  std::chrono::milliseconds silence = std::chrono::seconds(10);
  std::string address = "127.0.0.1";  // that gloo listens on
  // Where every rank writes what it did last (flight-rank-N.json) when one has
  // failed; empty: the folder that TESSERA_FLIGHT_RECORD names, if any.
  std::string record_folder = {};
  // The host of each rank, by any names; empty: ranks say where they are. Asked
  // for where collectives are hierarchical.
  std::vector<std::string> hosts = {};
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t world_size() const = 0;
  // As resolved: "shm+gloo", "nccl+shm" ...
  virtual const std::string& backend() const = 0;
  // The group of all ranks.
  virtual Group& world() = 0;
  // The group of these global ranks (ascending), or nullptr when this rank is
  // not one of them. Owned by the communicator. The same ranks and name give
  // the same group. But for fake, it blocks until every member has called it.
  virtual Group* make_group(const std::vector<int64_t>& ranks,
                            const std::string& name) = 0;
  virtual std::vector<Group*> groups() = 0;
  // In which some operation was under way so far, on any group of two ranks or
  // more: no more than the time that passed, however many there were at once.
  virtual double seconds_busy() const = 0;
  // world().empty(): of use to every group.
  virtual at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) = 0;
};

std::unique_ptr<Communicator> make_communicator(
    const CommunicatorOptions& options);

// Group::compare_calls() of every group that this rank is in; every rank calls
// it: before what is to be kept is written.
void compare_calls(Communicator& ranks);

// "shm", "gloo", "mpi" ...: what this build has; with a reason for the rest.
struct BackendInfo {
  std::string name;
  bool built = false;
  std::string note;
};
std::vector<BackendInfo> backends();

// Runs `body(communicator)` on `world_size` ranks as threads of this process,
// and joins them. The first failure is rethrown when all have ended; a rank
// that fails makes the others' pending operations fail too. Sets each thread's
// RankContext and device, and shares the cores out among them.
void run_threads(int64_t world_size, const std::string& backend,
                 const std::function<void(Communicator&)>& body,
                 std::chrono::milliseconds timeout = std::chrono::minutes(1));
// The same, with all options; `rank` and `store` are filled in.
void run_threads(CommunicatorOptions options,
                 const std::function<void(Communicator&)>& body);

}  // namespace tessera::comm
