#include "tessera/launch/detail/store_server.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/launch/detail/store_messages.h"

namespace tessera::launch::detail {
namespace {

using Clock = std::chrono::steady_clock;
using Side = JobToken::Side;
using std::chrono::milliseconds, std::chrono::seconds;

constexpr size_t kMostStrangers = 64;
constexpr auto kToProve = seconds(2);
// How often refusals are told at most.
constexpr auto kSay = seconds(5);

struct Wait {
  std::vector<std::string> keys;
  Clock::time_point end;
  bool gets = false;  // the value of the one key
};

struct Guest {
  int socket = -1;
  std::string address;
  enum class Phase { kHello, kProof, kKnown } phase = Phase::kHello;
  Clock::time_point end;  // of a stranger's patience
  Nonces nonces = {};
  std::optional<Seal> came = {}, sent = {};
  std::string in = {}, out = {};
  std::optional<Wait> wait = {};

  bool is_stranger() const { return phase != Phase::kKnown; }
};

std::string address_of(const sockaddr_storage& address, socklen_t size) {
  char text[NI_MAXHOST] = "?";
  getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, text,
              sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

class Server {
 public:
  Server(int socket, int stop, const JobToken& token)
      : socket_(socket), stop_(stop), token_(token) {}

  void run() {
    while (look()) {
      answer_those_who_wait();
      let_go_who_proves_nothing();
    }
    for (const Guest& guest : guests_) close(guest.socket);
  }

 private:
  // Waits for what comes; false: the server ends.
  bool look() {
    std::vector<pollfd> polled = {
        {.fd = stop_, .events = POLLIN, .revents = 0},
        {.fd = socket_, .events = POLLIN, .revents = 0}};
    for (const Guest& guest : guests_) {
      const short events = guest.out.empty() ? POLLIN : POLLOUT;
      polled.push_back({.fd = guest.socket, .events = events, .revents = 0});
    }
    poll(polled.data(), polled.size(), until_next_end());
    if (polled[0].revents != 0) return false;
    size_t i = 2;
    for (auto guest = guests_.begin(); guest != guests_.end(); ++i) {
      const bool stays = polled[i].revents == 0 || serve(*guest);
      guest = stays ? std::next(guest) : let_go(guest);
    }
    if (polled[1].revents != 0) welcome();
    return true;
  }

  int until_next_end() const {
    auto end = Clock::time_point::max();
    for (const Guest& guest : guests_) {
      if (guest.is_stranger()) end = std::min(end, guest.end);
      if (guest.wait) end = std::min(end, guest.wait->end);
    }
    if (end == Clock::time_point::max()) return -1;
    const auto left =
        std::chrono::ceil<milliseconds>(end - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, 1000));
  }

  void welcome() {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    const int socket = accept4(socket_, reinterpret_cast<sockaddr*>(&address),
                               &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket < 0) {
      // Descriptors are short, perhaps: they come back as guests leave.
      if (errno == EMFILE || errno == ENFILE) usleep(10'000);
      return;
    }
    const int on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    // A rank proves itself at once: the oldest stranger is none.
    const auto is_stranger = [](const Guest& g) { return g.is_stranger(); };
    if (std::ranges::count_if(guests_, is_stranger) >=
        static_cast<std::ptrdiff_t>(kMostStrangers)) {
      let_go(std::ranges::find_if(guests_, is_stranger));
    }
    guests_.push_back({.socket = socket,
                       .address = address_of(address, size),
                       .end = Clock::now() + kToProve});
  }

  std::list<Guest>::iterator let_go(std::list<Guest>::iterator guest) {
    if (guest->is_stranger()) tell_of(*guest);
    close(guest->socket);
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
      const bool is_late = guest->is_stranger() && Clock::now() > guest->end;
      guest = is_late ? let_go(guest) : std::next(guest);
    }
  }

  // How much more a guest may say before it is answered.
  static size_t wanted(const Guest& guest) {
    const size_t whole =
        guest.phase == Guest::Phase::kHello   ? kHello.size() + sizeof(Bytes32)
        : guest.phase == Guest::Phase::kProof ? sizeof(Bytes32)
                                              : size_t{1} << 20;
    return guest.phase == Guest::Phase::kKnown ? whole
                                               : whole - guest.in.size();
  }

  // Takes what has come and answers it. False: the guest has gone, or says what
  // no rank says.
  bool serve(Guest& guest) {
    if (!guest.out.empty()) return send_rest(guest) && take(guest);
    std::string came(wanted(guest), '\0');
    const ssize_t got = recv(guest.socket, came.data(), came.size(), 0);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got == 0) return false;
    guest.in.append(came, 0, static_cast<size_t>(got));
    return take(guest);
  }

  bool take(Guest& guest) {
    while (guest.out.empty() && !guest.wait) {
      const size_t before = guest.in.size();
      if (!(guest.is_stranger() ? greet(guest) : hear(guest))) return false;
      if (guest.in.size() == before) return true;  // more is to come
    }
    return true;
  }

  bool greet(Guest& guest) {
    const auto taken = [&](size_t from) {
      Bytes32 bytes;
      std::copy_n(guest.in.begin() + static_cast<std::ptrdiff_t>(from),
                  bytes.size(), bytes.begin());
      return bytes;
    };
    if (guest.phase == Guest::Phase::kHello) {
      const size_t known = std::min(guest.in.size(), kHello.size());
      if (guest.in.compare(0, known, kHello, 0, known) != 0) return false;
      if (guest.in.size() < kHello.size() + sizeof(Bytes32)) return true;
      guest.nonces = {.client = taken(kHello.size()), .server = draw_nonce()};
      guest.in.clear();
      guest.phase = Guest::Phase::kProof;
      std::string answer(guest.nonces.server.begin(),
                         guest.nonces.server.end());
      const Bytes32 proof = token_.proof_of(Side::kServer, guest.nonces);
      answer.append(proof.begin(), proof.end());
      return say(guest, answer);
    }
    if (guest.in.size() < sizeof(Bytes32)) return true;
    if (!are_same(taken(0), token_.proof_of(Side::kClient, guest.nonces))) {
      return false;
    }
    guest.in.clear();
    guest.phase = Guest::Phase::kKnown;
    guest.came = token_.seal_of(Side::kClient, guest.nonces);
    guest.sent = token_.seal_of(Side::kServer, guest.nonces);
    return true;
  }

  bool hear(Guest& guest) {
    uint32_t size = 0;
    if (guest.in.size() < sizeof size) return true;
    std::memcpy(&size, guest.in.data(), sizeof size);
    if (size > kMostBytes) return false;
    if (guest.in.size() < sizeof size + size) return true;
    const auto message =
        guest.came->open(std::string_view(guest.in).substr(sizeof size, size));
    guest.in.erase(0, sizeof size + size);
    return message && answer(guest, *message);
  }

  bool answer(Guest& guest, const std::string& message) {
    MessageReader read(message);
    const auto request = read.word();
    if (!request) return false;
    switch (static_cast<Request>(*request)) {
      case Request::kSet: {
        const auto key = read.bytes(), value = read.bytes();
        if (!value || !read.at_end()) return false;
        values_[*key] = *value;
        return say_done(guest, MessageWriter(Answer::kDone));
      }
      case Request::kGet:
      case Request::kWait: {
        const auto time = read.number();
        const auto keys = rest_of(read);
        if (!time || !keys || keys->empty()) return false;
        constexpr int64_t kLongest = int64_t{1000} * 60 * 60 * 24 * 365;
        guest.wait = {.keys = *keys,
                      .end = Clock::now() + milliseconds(std::clamp<int64_t>(
                                                *time, 0, kLongest)),
                      .gets = static_cast<Request>(*request) == Request::kGet};
        return true;
      }
      case Request::kCheck: {
        const auto keys = rest_of(read);
        return keys &&
               say_done(
                   guest,
                   MessageWriter(Answer::kDone).add(int64_t{are_there(*keys)}));
      }
      case Request::kAdd: {
        const auto key = read.bytes();
        const auto number = read.number();
        if (!number || !read.at_end()) return false;
        std::string& value = values_[*key];
        int64_t before = 0;
        std::from_chars(value.data(), value.data() + value.size(), before);
        value = std::to_string(before + *number);
        return say_done(guest,
                        MessageWriter(Answer::kDone).add(before + *number));
      }
      case Request::kCompareSet: {
        const auto key = read.bytes(), expected = read.bytes(),
                   desired = read.bytes();
        if (!desired || !read.at_end()) return false;
        return say_done(guest,
                        MessageWriter(Answer::kDone)
                            .add(compare_set(*key, *expected, *desired)));
      }
      case Request::kDelete: {
        const auto key = read.bytes();
        if (!key || !read.at_end()) return false;
        return say_done(guest,
                        MessageWriter(Answer::kDone)
                            .add(static_cast<int64_t>(values_.erase(*key))));
      }
      case Request::kCount:
        return say_done(guest, MessageWriter(Answer::kDone)
                                   .add(static_cast<int64_t>(values_.size())));
    }
    return false;
  }

  static std::optional<std::vector<std::string>> rest_of(MessageReader& read) {
    std::vector<std::string> keys;
    while (!read.at_end()) {
      auto key = read.bytes();
      if (!key) return std::nullopt;
      keys.push_back(std::move(*key));
    }
    return keys;
  }

  bool are_there(const std::vector<std::string>& keys) const {
    return std::ranges::all_of(
        keys, [&](const std::string& key) { return values_.contains(key); });
  }

  // As c10d's TCPStore: a key that is not there is only set where nothing is
  // expected.
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired) {
    const auto found = values_.find(key);
    if (found == values_.end() && !expected.empty()) return expected;
    if (found == values_.end() || found->second == expected) {
      return values_[key] = desired;
    }
    return found->second;
  }

  void answer_those_who_wait() {
    for (auto guest = guests_.begin(); guest != guests_.end();) {
      bool stays = true;
      if (guest->wait) stays = answer_where_it_may(*guest);
      guest = stays ? std::next(guest) : let_go(guest);
    }
  }

  bool answer_where_it_may(Guest& guest) {
    const bool has_come = are_there(guest.wait->keys);
    if (!has_come && Clock::now() < guest.wait->end) return true;
    const Wait wait = std::move(*guest.wait);
    guest.wait.reset();
    MessageWriter answer(has_come ? Answer::kDone : Answer::kTimedOut);
    if (has_come && wait.gets) answer.add(values_.at(wait.keys.front()));
    return say_done(guest, answer) && take(guest);
  }

  bool say_done(Guest& guest, const MessageWriter& answer) {
    return say(guest, framed(guest.sent->close(answer.text())));
  }

  bool say(Guest& guest, const std::string& bytes) {
    guest.out += bytes;
    return send_rest(guest);
  }

  static bool send_rest(Guest& guest) {
    const ssize_t sent =
        send(guest.socket, guest.out.data(), guest.out.size(), MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    guest.out.erase(0, static_cast<size_t>(sent));
    return true;
  }

  const int socket_, stop_;
  const JobToken token_;
  std::list<Guest> guests_;  // those that came first in front
  std::map<std::string, std::string> values_;
  std::optional<Clock::time_point> told_;
  int64_t refused_ = 0;
};

}  // namespace

StoreServer::StoreServer(int socket, const JobToken& token)
    : socket_(socket), stop_(eventfd(0, EFD_CLOEXEC)) {
  TS_CHECK_REACH(
      stop_ >= 0 && listen(socket_, SOMAXCONN) == 0,
      "launch: the rendezvous does not listen: ", std::strerror(errno));
  thread_ =
      std::thread([socket, stop = stop_, token, context = rank_context()] {
        const RankContextGuard guard(context);
        Server(socket, stop, token).run();
      });
}

StoreServer::~StoreServer() {
  eventfd_write(stop_, 1);
  thread_.join();
  close(stop_);
  close(socket_);
}

}  // namespace tessera::launch::detail
