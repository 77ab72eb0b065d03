#include "tessera/launch/detail/store_server.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/launch/detail/addresses.h"
#include "tessera/launch/detail/store_messages.h"
#include "tessera/launch/detail/store_values.h"

namespace tessera::launch::detail {
namespace {

using Clock = std::chrono::steady_clock;
using Side = JobToken::Side;
using std::chrono::milliseconds, std::chrono::seconds;

constexpr size_t kMostStrangers = 64;
constexpr auto kToProve = seconds(2);
// A rank has proved itself by then, mostly: it stays where there are too many.
constexpr auto kPatience = milliseconds(100);
// How long nobody is taken in where the system lacks what it takes.
constexpr auto kPause = milliseconds(100);
// How often refusals are told at most.
constexpr auto kSay = seconds(5);

struct Guest {
  Fd socket;
  std::string address;
  enum class Phase { kHello, kProof, kKnown } phase = Phase::kHello;
  Clock::time_point came;
  Nonces nonces = {};
  std::optional<Seal> heard = {}, said = {};
  std::optional<size_t> size = {};  // of the message that comes, sealed
  std::string in = {}, out = {};
  std::optional<StoreValues::Wait> wait = {};

  bool is_stranger() const { return phase != Phase::kKnown; }
  // Bytes of the next thing that it says.
  size_t wanted() const {
    switch (phase) {
      case Phase::kHello:
        return kHello.size() + sizeof(Bytes32);
      case Phase::kProof:
        return sizeof(Bytes32);
      case Phase::kKnown:
        return size.value_or(kSealedLength);
    }
    return 0;
  }
  short events() const {
    if (!out.empty()) return POLLOUT;
    return static_cast<short>(wait ? POLLRDHUP : POLLIN);
  }
};

Bytes32 bytes_at(const std::string& text, size_t begin) {
  Bytes32 bytes;
  std::memcpy(bytes.data(), text.data() + begin, bytes.size());
  return bytes;
}

class Server {
 public:
  Server(int socket, int stop, const JobToken& token)
      : socket_(socket), stop_(stop), token_(token) {}

  void run() {
    while (serve_what_comes()) {
      answer_those_who_wait();
      let_go_who_proves_nothing();
    }
  }

 private:
  // Waits for it; false: the server ends.
  bool serve_what_comes() {
    const auto closed = closed_until();
    const bool is_open = Clock::now() >= closed;
    std::vector<pollfd> polled = {
        {.fd = stop_, .events = POLLIN, .revents = 0},
        {.fd = is_open ? socket_ : -1, .events = POLLIN, .revents = 0}};
    for (const Guest& guest : guests_) {
      polled.push_back(
          {.fd = guest.socket.get(), .events = guest.events(), .revents = 0});
    }
    poll(polled.data(), polled.size(), until_next_end(closed));
    if (polled[0].revents != 0) return false;
    size_t i = 2;
    for (auto guest = guests_.begin(); guest != guests_.end(); ++i) {
      const bool stays = polled[i].revents == 0 || serve(*guest);
      guest = stays ? std::next(guest) : let_go(guest);
    }
    if (polled[1].revents != 0) welcome();
    return true;
  }

  int until_next_end(Clock::time_point closed) const {
    constexpr auto kLongest = seconds(10);
    const auto now = Clock::now();
    auto end = now + kLongest;
    if (closed > now) end = std::min(end, closed);
    for (const Guest& guest : guests_) {
      if (guest.is_stranger()) end = std::min(end, guest.came + kToProve);
      if (guest.wait) end = std::min(end, guest.wait->end);
    }
    const auto left = std::chrono::ceil<milliseconds>(end - now).count();
    return static_cast<int>(std::max<int64_t>(left, 0));
  }

  // Until when nobody is accepted.
  Clock::time_point closed_until() const {
    if (!is_full()) return paused_until_;
    return std::max(paused_until_, oldest_stranger()->came + kPatience);
  }

  bool is_full() const {
    const auto strangers = std::ranges::count_if(guests_, &Guest::is_stranger);
    return strangers >= static_cast<std::ptrdiff_t>(kMostStrangers);
  }

  std::list<Guest>::const_iterator oldest_stranger() const {
    return std::ranges::find_if(guests_, &Guest::is_stranger);
  }

  void welcome() {
    if (is_full()) let_go(oldest_stranger());
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    Fd socket(accept4(socket_, generic, &size, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.open()) {
      const bool has_gone =
          errno == EAGAIN || errno == ECONNABORTED || errno == EINTR;
      if (!has_gone) paused_until_ = Clock::now() + kPause;
      return;
    }
    const int on = 1;
    setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    guests_.push_back({.socket = std::move(socket),
                       .address = in_numbers(generic, size),
                       .came = Clock::now()});
  }

  std::list<Guest>::iterator let_go(std::list<Guest>::const_iterator guest) {
    if (guest->is_stranger()) tell_of(*guest);
    return guests_.erase(guest);
  }

  void tell_of(const Guest& stranger) {
    ++refused_;
    if (told_ && Clock::now() < *told_ + kSay) return;
    told_ = Clock::now();
    log::warning("launch: who came to the rendezvous from ", stranger.address,
                 " did not prove that it knows the job's token, and was let "
                 "go (",
                 std::exchange(refused_, 0), " since the last word).");
  }

  void let_go_who_proves_nothing() {
    for (auto guest = guests_.begin(); guest != guests_.end();) {
      const bool is_late =
          guest->is_stranger() && Clock::now() >= guest->came + kToProve;
      guest = is_late ? let_go(guest) : std::next(guest);
    }
  }

  // Takes what has come and answers it. False: the guest has gone, or says what
  // no rank says.
  bool serve(Guest& guest) {
    if (!guest.out.empty()) return send_rest(guest);
    if (guest.wait) return false;
    const size_t most = guest.wanted() - guest.in.size();
    const ssize_t got = recv(guest.socket.get(), buffer_.data(),
                             std::min(most, buffer_.size()), 0);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got == 0) return false;
    guest.in.append(buffer_, 0, static_cast<size_t>(got));
    return guest.phase == Guest::Phase::kHello   ? greet(guest)
           : guest.in.size() < guest.wanted()    ? true
           : guest.phase == Guest::Phase::kProof ? take_in(guest)
                                                 : hear(guest);
  }

  bool greet(Guest& guest) {
    const size_t known = std::min(guest.in.size(), kHello.size());
    if (guest.in.compare(0, known, kHello, 0, known) != 0) return false;
    if (guest.in.size() < guest.wanted()) return true;
    guest.nonces = {.client = bytes_at(guest.in, kHello.size()),
                    .server = draw_nonce()};
    guest.in.clear();
    guest.phase = Guest::Phase::kProof;
    for (const Bytes32& part :
         {guest.nonces.server, token_.proof_of(Side::kServer, guest.nonces)}) {
      guest.out.append(part.begin(), part.end());
    }
    return send_rest(guest);
  }

  bool take_in(Guest& guest) const {
    const Bytes32 proof = bytes_at(std::exchange(guest.in, {}), 0);
    if (!are_same(proof, token_.proof_of(Side::kClient, guest.nonces))) {
      return false;
    }
    guest.phase = Guest::Phase::kKnown;
    guest.heard = token_.seal_of(Side::kClient, guest.nonces);
    guest.said = token_.seal_of(Side::kServer, guest.nonces);
    return say(guest, MessageWriter(Answer::kDone));
  }

  bool hear(Guest& guest) {
    const std::string sealed = std::exchange(guest.in, {});
    if (!guest.size) {
      guest.size = size_after(*guest.heard, sealed);
      return guest.size.has_value() || refuse(guest);
    }
    guest.size.reset();
    const auto message = guest.heard->open(sealed);
    auto outcome = message ? values_.hear(*message) : std::nullopt;
    if (!outcome) return refuse(guest);
    if (const auto* answer = std::get_if<MessageWriter>(&*outcome)) {
      return say(guest, *answer);
    }
    guest.wait = std::get<StoreValues::Wait>(std::move(*outcome));
    return answer_where_it_may(guest);
  }

  static bool refuse(const Guest& guest) {
    log::warning("launch: what came to the rendezvous from a rank at ",
                 guest.address,
                 " is no request, or was changed on the way: it was let go.");
    return false;
  }

  void answer_those_who_wait() {
    const bool has_news = values_.has_news();
    for (auto guest = guests_.begin(); guest != guests_.end();) {
      const bool may =
          guest->wait && (has_news || Clock::now() >= guest->wait->end);
      const bool stays = !may || answer_where_it_may(*guest);
      guest = stays ? std::next(guest) : let_go(guest);
    }
  }

  bool answer_where_it_may(Guest& guest) const {
    const auto answer = values_.answer_to(*guest.wait);
    if (!answer) return true;
    guest.wait.reset();
    return say(guest, *answer);
  }

  static bool say(Guest& guest, const MessageWriter& answer) {
    guest.out += sealed_pieces(*guest.said, answer.text());
    return send_rest(guest);
  }

  static bool send_rest(Guest& guest) {
    const ssize_t sent = send(guest.socket.get(), guest.out.data(),
                              guest.out.size(), MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    guest.out.erase(0, static_cast<size_t>(sent));
    return true;
  }

  const int socket_, stop_;
  const JobToken token_;
  std::list<Guest> guests_;  // those that came first in front
  StoreValues values_;
  std::string buffer_ = std::string(size_t{1} << 16, '\0');
  Clock::time_point paused_until_ = Clock::now();
  std::optional<Clock::time_point> told_;
  int64_t refused_ = 0;
};

// Ranks whose connections close say themselves that they lost the rendezvous.
void run_server(int socket, int stop, const JobToken& token) noexcept {
  try {
    Server(socket, stop, token).run();
  } catch (const std::exception& error) {
    log::error("launch: the rendezvous ends: ", message_of(error));
  }
}

}  // namespace

StoreServer::StoreServer(int socket, const JobToken& token)
    : socket_(socket), stop_(eventfd(0, EFD_CLOEXEC)) {
  // Whoever has gone again must not hold up the thread in accept().
  TS_CHECK_REACH(
      stop_.open() && fcntl(socket, F_SETFL, O_NONBLOCK) == 0 &&
          listen(socket, SOMAXCONN) == 0,
      "launch: the rendezvous does not listen: ", std::strerror(errno));
  thread_ = std::thread(
      [socket, stop = stop_.get(), token, context = rank_context()] {
        const RankContextGuard guard(context);
        run_server(socket, stop, token);
      });
}

StoreServer::~StoreServer() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

}  // namespace tessera::launch::detail
