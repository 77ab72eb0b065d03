#include "tessera/launch/store.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/core/broken_pipe.h"
#include "tessera/core/error.h"
#include "tessera/core/exit_code.h"
#include "tessera/core/fd.h"
#include "tessera/core/host.h"
#include "tessera/core/log.h"
#include "tessera/launch/detail/addresses.h"
#include "tessera/launch/detail/deadline.h"
#include "tessera/launch/detail/preparation.h"
#include "tessera/launch/detail/roll_call.h"
#include "tessera/launch/detail/token_store.h"

namespace tessera::launch {
namespace {

using detail::AddressList, detail::addresses_of, detail::in_numbers;
using detail::StorePtr;

// Whether MASTER_ADDR is a name that means the loopback on its own host (as by
// Debian's 127.0.1.1 in /etc/hosts), while ranks are elsewhere. Who writes
// localhost or a number asks for just that.
bool misleads(const RankEnvironment& here, const addrinfo& found) {
  const std::string& host = here.rendezvous.host;
  if (here.local_world_size == here.world_size || host == "localhost" ||
      host == "::1" || host.starts_with("127.")) {
    return false;
  }
  const std::string number = in_numbers(found.ai_addr, found.ai_addrlen);
  return number == "::1" || number.starts_with("127.");
}

// A socket that is bound to it, or -1 and errno.
int bound_to(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC,
                        address.ai_protocol);
  if (fd < 0) return -1;
  const int on = 1, off = 0;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (bind(fd, address.ai_addr, address.ai_addrlen) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

// A socket bound to exactly the address that was asked for, or -1 when that
// address is none of this host's (behind a translation of addresses) or none
// that others reach.
int bind_exactly(const RankEnvironment& here) {
  const Rendezvous& meet = here.rendezvous;
  const AddressList list = addresses_of(meet.host, meet.port, SOCK_STREAM);
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    if (misleads(here, *a)) continue;
    const int fd = bound_to(*a);
    if (fd >= 0) return fd;
    TS_CHECK_REACH(errno != EADDRINUSE, "launch: port ", meet.port, " of ",
                   meet.host,
                   " is held by another process. Choose another "
                   "MASTER_PORT, or end that process.");
    TS_CHECK_REACH(errno != EACCES, "launch: port ", meet.port, " of ",
                   meet.host,
                   " needs a privilege that this process lacks. "
                   "Choose a MASTER_PORT of 1024 or more.");
  }
  return -1;
}

// The same on all addresses of this host: of both kinds, where it has both.
int bind_anywhere(uint16_t port) {
  for (const char* any : {"::", "0.0.0.0"}) {
    const int fd = bound_to(*addresses_of(any, port, SOCK_STREAM));
    if (fd >= 0) return fd;
  }
  TS_CHECK_REACH(false, "launch: port ", port,
                 " of this host: ", std::strerror(errno),
                 ". Choose another MASTER_PORT.");
}

// Where rank 0 listens; -1: on all addresses.
int place_to_listen(const RankEnvironment& here) {
  // Who asks and does not wait for the answer must not end this rank.
  ignore_broken_pipes();
  const int fd = bind_exactly(here);
  if (fd < 0) {
    log::warning("launch: MASTER_ADDR=", here.rendezvous.host,
                 " is no address of this host that others reach; the "
                 "rendezvous listens on all of its addresses.");
  }
  return fd;
}

// What `make` makes within the time to join; it throws c10d's errors.
StorePtr reached(const RankEnvironment& here, std::function<StorePtr()> make) {
  const Rendezvous& meet = here.rendezvous;
  const std::string nobody = c10::str(
      "launch: no rendezvous at ", meet.host, ":", meet.port, " within ",
      detail::in_seconds(here.join_timeout), " s. Rank 0 is absent, ",
      meet.token_file.empty()
          ? "has a token that this rank has not (TESSERA_TOKEN_FILE)"
          : "has no token as this rank has (TESSERA_TOKEN_FILE)",
      ", another program holds the port, or the network is closed "
      "between ",
      host_name(), " and that host.");
  return detail::within(here.join_timeout + detail::kDeadlineSlack, nobody,
                        [make = std::move(make), nobody]() -> StorePtr {
                          try {
                            return make();
                          } catch (const c10::DistError& error) {
                            TS_CHECK_REACH(false, nobody, " (",
                                           error.what_without_backtrace(), ")");
                          }
                          return {};
                        });
}

bool serves(const RankEnvironment& here) {
  return here.rank == 0 && !here.rendezvous.served_elsewhere;
}

StorePtr make_tcp_store(const RankEnvironment& here) {
  const Rendezvous& meet = here.rendezvous;
  c10d::TCPStoreOptions options;
  options.port = meet.port;
  options.isServer = serves(here);
  options.waitWorkers = false;  // the roll call below names who is absent
  options.timeout = here.join_timeout;
  if (options.isServer) {
    const int fd = place_to_listen(here);
    if (fd >= 0) options.masterListenFd = fd;
  }
  return reached(here, [host = meet.host, options] {
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  });
}

StorePtr make_token_store(const RankEnvironment& here) {
  const Rendezvous& meet = here.rendezvous;
  detail::TokenStoreOptions options{
      .host = meet.host,
      .port = meet.port,
      .token = detail::JobToken::of_file(meet.token_file),
      .timeout = here.join_timeout};
  if (serves(here)) {
    const int fd = place_to_listen(here);
    options.server = std::make_shared<detail::StoreServer>(
        fd >= 0 ? fd : bind_anywhere(meet.port), options.token);
  }
  return reached(here, [options] {
    return c10::make_intrusive<detail::TokenStore>(options);
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
        detail::in_seconds(here.join_timeout),
        " s. Is it the file of a launcher, and not of something else?");
    // -1 worker: the launcher made the file, no rank removes it.
    store = detail::within(here.join_timeout, junk, [file = meet.file] {
      return StorePtr(c10::make_intrusive<c10d::FileStore>(file, -1));
    });
  } else {
    const bool is_open = meet.token_file.empty();
    if (is_open && serves(here) && here.local_world_size < here.world_size) {
      log::info("whoever reaches ", meet.host, ":", meet.port,
                " may change this run: it has no token (TESSERA_TOKEN_FILE)");
    }
    store = is_open ? make_tcp_store(here) : make_token_store(here);
  }
  return c10::make_intrusive<c10d::PrefixStore>("tessera/" + meet.attempt,
                                                store);
}

// The address of this host on the way to another, or "" where there is no way.
// Nothing is sent: to connect a datagram socket only chooses a route.
std::string address_towards(const addrinfo& other) {
  const Fd datagrams(socket(other.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!datagrams.open()) return "";
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  const bool routed =
      connect(datagrams.get(), other.ai_addr, other.ai_addrlen) == 0 &&
      getsockname(datagrams.get(), reinterpret_cast<sockaddr*>(&own), &size) ==
          0;
  return routed ? in_numbers(reinterpret_cast<sockaddr*>(&own), size) : "";
}

// On the way out of this host. The address is one of RFC 5737, nobody's.
std::string outward_address() {
  return address_towards(*addresses_of("192.0.2.1", 9, SOCK_DGRAM));
}

// On the way to the rendezvous.
std::string own_address(const RankEnvironment& here) {
  const Rendezvous& meet = here.rendezvous;
  const AddressList list = addresses_of(meet.host, meet.port, SOCK_DGRAM);
  bool is_misled = false;
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    const bool skipped = misleads(here, *a);
    is_misled |= skipped;
    const std::string own = skipped ? "" : address_towards(*a);
    if (!own.empty()) return own;
  }
  const std::string outward = is_misled ? outward_address() : "";
  TS_CHECK_CONFIG(!is_misled || !outward.empty(),
                  "launch: MASTER_ADDR=", meet.host,
                  " is a loopback address on ", host_name(),
                  " itself (as 127.0.1.1 in /etc/hosts is), and no route leads "
                  "out of this host. Set MASTER_ADDR to an address of it that "
                  "the other hosts reach.");
  TS_CHECK_REACH(!outward.empty(), "launch: ", host_name(), " has no route to ",
                 meet.host, ".");
  return outward;
}

Error as_error(const std::exception& error) {
  return {exit_code_of(error), message_of(error)};
}

// Leaves this rank's refusal at the store that `reach` gives. Peers that cannot
// be told find out by themselves.
void tell(const RankEnvironment& here, const Error& error,
          const std::function<StorePtr()>& reach,
          std::chrono::milliseconds patience) noexcept {
  try {
    detail::within(2 * patience + detail::kDeadlineSlack,
                   "the rendezvous does not answer",
                   [here, error, reach, patience] {
                     const StorePtr store = reach();
                     detail::leave_refusal(here, *store, error, patience);
                   });
  } catch (const std::exception& untold) {
    log::debug("launch: the peers were not told: ", message_of(untold));
  }
}

// The same to peers that are all there.
void tell_all(const Meeting& meeting, const std::exception& error) noexcept {
  constexpr std::chrono::milliseconds kHearing = std::chrono::seconds(3);
  tell(
      meeting.environment, as_error(error),
      [store = meeting.store] { return store; }, kHearing);
}

// The same to peers that may not be there yet.
void tell_who_may_come(const RankEnvironment& environment, const Error& why) {
  std::promise<void> told;
  std::thread waits([&environment, &why, end = told.get_future()] {
    constexpr auto kSoon = std::chrono::seconds(1);
    if (end.wait_for(kSoon) == std::future_status::ready) return;
    log::warning("launch: rank ", environment.rank, " ends, and waits at most ",
                 detail::in_seconds(environment.join_timeout),
                 " s for the others, to tell them why: ", message_of(why));
  });
  tell(
      environment, why,
      [here = environment] {
        StorePtr store = make_store(here);
        detail::answer_the_roll(here, *store);
        return store;
      },
      environment.join_timeout);
  told.set_value();
  waits.join();
}

// Once all ranks are there.
RankEnvironment met(RankEnvironment here, c10d::Store& store) {
  try {
    detail::answer_the_roll(here, store);
    detail::await_all(here, store);
    detail::check_no_refusal(here, store);
    detail::complete_places(here, store);
  } catch (const c10::DistError& error) {
    TS_CHECK_REACH(false, "launch: rank ", here.rank,
                   " lost the rendezvous while ranks met: rank 0 gave up or "
                   "died; its message says why. (",
                   error.what_without_backtrace(), ")");
  }
  return here;
}

}  // namespace

Meeting join(RankEnvironment environment) {
  Meeting meeting{std::move(environment), nullptr};
  RankEnvironment& here = meeting.environment;
  meeting.store = make_store(here);
  if (here.world_size == 1) return meeting;
  try {
    here = detail::within(
        here.join_timeout + detail::kDeadlineSlack,
        c10::str("launch: rank ", here.rank,
                 " got no answer from the rendezvous while ranks met. Is rank "
                 "0 stopped, or its host cut off?"),
        [here, store = meeting.store] { return met(here, *store); });
  } catch (const PeerRefused& error) {
    tell_all(meeting, error);
    throw;
  }
  // From here on it is the communicator that says how long to wait.
  meeting.store->setTimeout(c10d::Store::kDefaultTimeout);
  if (here.local_world_size < here.world_size) {
    meeting.address = own_address(here);
  }
  return meeting;
}

void begin_together(const Meeting& meeting,
                    const std::function<void()>& prepare,
                    const std::function<void()>& begin) {
  const RankEnvironment& here = meeting.environment;
  if (here.world_size == 1) {
    prepare();
    return begin();
  }
  try {
    if (here.local_rank == 0) {
      const detail::Heartbeat beats(here, meeting.store);
      prepare();
      beats.check();
    }
    detail::within(
        here.join_timeout,
        c10::str("launch: the rendezvous did not answer within ",
                 detail::in_seconds(here.join_timeout),
                 " s: rank 0, or its host, is stopped or cut off."),
        [here, store = meeting.store] { detail::say_ready(here, *store); });
    detail::await_decision(here, meeting.store);
  } catch (const c10::DistError& error) {
    TS_CHECK_REACH(false, "launch: rank ", here.rank,
                   " lost the rendezvous while hosts prepared: rank 0, or "
                   "what started it, was ended; its message says why. (",
                   error.what_without_backtrace(), ")");
  } catch (const std::exception& error) {
    tell_all(meeting, error);
    throw;
  }
  try {
    begin();
  } catch (const std::exception& error) {
    tell_all(meeting, error);
    throw;
  }
}

void refuse(const RankEnvironment& environment,
            const std::exception& error) noexcept {
  if (environment.rendezvous.kind != Rendezvous::Kind::kTcp) return;
  try {
    tell_who_may_come(environment, as_error(error));
  } catch (const std::exception& untold) {
    log::debug("launch: the peers were not told: ", message_of(untold));
  }
}

}  // namespace tessera::launch
