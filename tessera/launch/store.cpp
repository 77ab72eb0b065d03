#include "tessera/launch/store.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <random>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/core/broken_pipe.h"
#include "tessera/core/error.h"
#include "tessera/core/host.h"
#include "tessera/core/log.h"
#include "tessera/launch/detail/deadline.h"

namespace tessera::launch {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
// What a deadline of ours gives c10d's own time-out, to name the cause itself.
constexpr std::chrono::milliseconds kSlack = std::chrono::seconds(1);
using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList addresses_of(const Rendezvous& meet, int type) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(meet.port);
  const int error =
      getaddrinfo(meet.host.c_str(), port.c_str(), &hints, &found);
  TS_CHECK_REACH(error == 0, "launch: MASTER_ADDR=", meet.host,
                 " is not known: ", gai_strerror(error),
                 ". Use an address or a name that every host resolves.");
  return AddressList(found, &freeaddrinfo);
}

double seconds(std::chrono::milliseconds time) {
  return static_cast<double>(time.count()) / 1000;
}

// A socket bound to exactly the address that was asked for, or -1 when that
// address is none of this host's (behind a translation of addresses).
int bind_exactly(const Rendezvous& meet) {
  const AddressList list = addresses_of(meet, SOCK_STREAM);
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    const int fd =
        socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (fd < 0) continue;
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0) return fd;
    const int error = errno;
    close(fd);
    TS_CHECK_REACH(error != EADDRINUSE, "launch: port ", meet.port, " of ",
                   meet.host,
                   " is held by another process. Choose another "
                   "MASTER_PORT, or end that process.");
    TS_CHECK_REACH(error != EACCES, "launch: port ", meet.port, " of ",
                   meet.host,
                   " needs a privilege that this process lacks. "
                   "Choose a MASTER_PORT of 1024 or more.");
  }
  return -1;
}

StorePtr make_tcp_store(const RankEnvironment& here) {
  const Rendezvous& meet = here.rendezvous;
  c10d::TCPStoreOptions options;
  options.port = meet.port;
  options.isServer = here.rank == 0 && !meet.served_elsewhere;
  options.waitWorkers = false;  // the roll call below names who is absent
  options.timeout = here.join_timeout;
  if (options.isServer) {
    // Who asks and does not wait for the answer must not end this rank.
    ignore_broken_pipes();
    const int fd = bind_exactly(meet);
    if (fd >= 0) {
      options.masterListenFd = fd;
    } else {
      log::warning("launch: MASTER_ADDR=", meet.host,
                   " is no address of this host; the rendezvous listens on "
                   "all of its addresses.");
    }
  }
  const std::string nobody =
      c10::str("launch: no rendezvous at ", meet.host, ":", meet.port,
               " within ", seconds(here.join_timeout),
               " s. Rank 0 is absent, another program holds "
               "the port, or the network is closed between ",
               host_name(), " and that host.");
  return detail::within(here.join_timeout + kSlack, nobody,
                        [host = meet.host, options, nobody]() -> StorePtr {
                          try {
                            return c10::make_intrusive<c10d::TCPStore>(host,
                                                                       options);
                          } catch (const c10::DistError& error) {
                            TS_CHECK_REACH(false, nobody, " (",
                                           error.what_without_backtrace(), ")");
                          }
                          return {};
                        });
}

StorePtr make_store(const RankEnvironment& here) {
  const Rendezvous& meet = here.rendezvous;
  if (meet.kind == Rendezvous::Kind::kNone) {
    return c10::make_intrusive<c10d::HashStore>();
  }
  StorePtr store;
  if (meet.kind == Rendezvous::Kind::kFile) {
    TS_CHECK_REACH(access(meet.file.c_str(), R_OK | W_OK) == 0,
                   "launch: TESSERA_STORE=", meet.file, ": ",
                   std::strerror(errno), ". It lives as long as the launcher.");
    // A file of something else is read again and again for ever.
    const std::string junk = c10::str(
        "launch: TESSERA_STORE=", meet.file, " gave no answer within ",
        seconds(here.join_timeout),
        " s. Is it the file of a launcher, and not of something else?");
    // -1 worker: the launcher made the file, no rank removes it.
    store = detail::within(here.join_timeout, junk, [file = meet.file] {
      return StorePtr(c10::make_intrusive<c10d::FileStore>(file, -1));
    });
  } else {
    store = make_tcp_store(here);
  }
  return c10::make_intrusive<c10d::PrefixStore>("tessera/" + meet.attempt,
                                                store);
}

std::string key_of(int64_t rank) { return "rank/" + std::to_string(rank); }

// "HOST/BOOT pid NUMBER/NONCE": no two processes say the same.
std::string introduce() {
  std::random_device random;
  return c10::str(host_identity(), " pid ", getpid(), "/", random());
}

std::string host_part(const std::string& introduction) {
  return introduction.substr(0, introduction.rfind(" pid "));
}

// "HOST, process PID" for people.
std::string readable(const std::string& introduction) {
  const size_t pid = introduction.rfind(" pid ");
  return c10::str(
      introduction.substr(0, introduction.find('/')), ", process ",
      introduction.substr(pid + 5, introduction.rfind('/') - pid - 5));
}

std::string absent_ranks(c10d::Store& store, int64_t world_size) {
  constexpr int kMostNamed = 20;
  std::string list;
  int64_t absent = 0;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    if (store.check({key_of(rank)})) continue;
    if (++absent <= kMostNamed) {
      list += c10::str(list.empty() ? "" : ", ", rank);
    }
  }
  if (absent > kMostNamed)
    list += c10::str(" and ", absent - kMostNamed, " more");
  return c10::str(absent == 1 ? "rank " : "ranks ", list);
}

void call_the_roll(const RankEnvironment& here, c10d::Store& store) {
  const std::string world = std::to_string(here.world_size);
  const std::string agreed = store.compareSet("world", "", world);
  TS_CHECK_CONFIG(agreed == world, "launch: rank ", here.rank,
                  " was told of a world of ", world,
                  " ranks, its peers of one of ", agreed,
                  ". Start all ranks with the same world size.");
  const std::string me = introduce();
  const std::string holder = store.compareSet(key_of(here.rank), "", me);
  TS_CHECK_CONFIG(holder == me, "launch: rank ", here.rank,
                  " is there already (", readable(holder),
                  "). Give each process a rank of its own.");
  std::vector<std::string> everyone;
  for (int64_t rank = 0; rank < here.world_size; ++rank) {
    everyone.push_back(key_of(rank));
  }
  // Rank 0 serves: the others give up before it does, so that each can still
  // read who is absent. c10d rounds its waits up to seconds.
  auto patience = here.join_timeout;
  if (here.rank != 0) patience -= std::min(patience / 2, kSlack);
  try {
    store.wait(everyone, patience);
  } catch (const c10::DistError&) {
    TS_CHECK_REACH(false, "launch: after ", seconds(patience), " s ",
                   absent_ranks(store, here.world_size), " of ",
                   here.world_size,
                   " did not come. Look at the logs of those; "
                   "for slow hosts set TESSERA_JOIN_TIMEOUT_S.");
  }
}

// Fills in what the launcher did not say, from the hosts of all ranks.
void complete_places(RankEnvironment& here, c10d::Store& store) {
  if (here.local_rank >= 0 && here.local_world_size >= 0 && here.node >= 0) {
    return;
  }
  const std::string my_host = host_part(store.get_to_str(key_of(here.rank)));
  std::vector<std::string> hosts;  // in the order of their first rank
  int64_t local_rank = 0, local_world_size = 0;
  for (int64_t rank = 0; rank < here.world_size; ++rank) {
    const std::string host = host_part(store.get_to_str(key_of(rank)));
    if (std::find(hosts.begin(), hosts.end(), host) == hosts.end()) {
      hosts.push_back(host);
    }
    if (host != my_host) continue;
    ++local_world_size;
    if (rank < here.rank) ++local_rank;
  }
  here.local_rank = local_rank;
  here.local_world_size = local_world_size;
  here.node = std::find(hosts.begin(), hosts.end(), my_host) - hosts.begin();
}

// The address of this host on the way to the rendezvous. Nothing is sent: to
// connect a datagram socket only chooses a route.
std::string own_address(const Rendezvous& meet) {
  const AddressList list = addresses_of(meet, SOCK_DGRAM);
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    const int fd = socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    const bool routed =
        connect(fd, a->ai_addr, a->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) == 0;
    close(fd);
    char text[NI_MAXHOST];
    if (routed && getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text,
                              sizeof text, nullptr, 0, NI_NUMERICHOST) == 0) {
      return text;
    }
  }
  TS_CHECK_REACH(false, "launch: ", host_name(), " has no route to ", meet.host,
                 ".");
  return {};
}

}  // namespace

Meeting join(RankEnvironment environment) {
  Meeting meeting{std::move(environment), nullptr};
  RankEnvironment& here = meeting.environment;
  meeting.store = make_store(here);
  if (here.world_size == 1) return meeting;
  here = detail::within(
      here.join_timeout + kSlack,
      c10::str("launch: rank ", here.rank,
               " got no answer from the rendezvous while ranks met. Is rank 0 "
               "stopped, or its host cut off?"),
      [here, store = meeting.store]() mutable {
        try {
          call_the_roll(here, *store);
          complete_places(here, *store);
        } catch (const c10::DistError& error) {
          TS_CHECK_REACH(false, "launch: rank ", here.rank,
                         " lost the rendezvous while ranks met: rank 0 gave "
                         "up or died; its message says why. (",
                         error.what_without_backtrace(), ")");
        }
        return here;
      });
  // From here on it is the communicator that says how long to wait.
  meeting.store->setTimeout(c10d::Store::kDefaultTimeout);
  if (here.local_world_size < here.world_size) {
    meeting.address = own_address(here.rendezvous);
  }
  return meeting;
}

}  // namespace tessera::launch
