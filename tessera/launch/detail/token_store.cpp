#include "tessera/launch/detail/token_store.h"

#include <c10/util/StringUtil.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/launch/detail/addresses.h"

namespace tessera::launch::detail {
namespace {

using Clock = std::chrono::steady_clock;
using Side = JobToken::Side;
using std::chrono::milliseconds, std::chrono::seconds;

// Of a server that is there: it greets at once.
constexpr auto kToGreet = seconds(2);
constexpr auto kBetweenTries = milliseconds(100);

std::string_view text_of(const std::vector<uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

// Whether all was sent, or received, before the socket's time-out.
bool send_all(int socket, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

bool receive_all(int socket, void* to, size_t size) {
  auto* at = static_cast<char*>(to);
  while (size > 0) {
    const ssize_t got = recv(socket, at, size, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    size -= static_cast<size_t>(got);
  }
  return true;
}

void set_time_out(int socket, seconds time) {
  const timeval limit{.tv_sec = time.count(), .tv_usec = 0};
  for (const int which : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    setsockopt(socket, SOL_SOCKET, which, &limit, sizeof limit);
  }
}

// A connection to the first of the addresses that takes one, or none and `why`.
// Connecting has the time-out of what is sent.
Fd connect_to(const std::string& host, uint16_t port, std::string& why) {
  AddressList list(nullptr, &freeaddrinfo);
  try {
    list = addresses_of(host, port, SOCK_STREAM);
  } catch (const Error& error) {
    why = message_of(error);  // a new host's name may be known a while later
  }
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    Fd socket(
        ::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
    if (socket.open()) {
      set_time_out(socket.get(), kToGreet);
      const int on = 1;
      setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
      if (connect(socket.get(), a->ai_addr, a->ai_addrlen) == 0) return socket;
    }
    why = std::strerror(errno);
  }
  return Fd();
}

enum class Greeted { kKnown, kUnknown, kSilent };

Greeted greet(int socket, const JobToken& token, Nonces& nonces) {
  nonces.client = draw_nonce();
  std::string hello(kHello);
  hello.append(nonces.client.begin(), nonces.client.end());
  Bytes32 proof;
  if (!send_all(socket, hello) ||
      !receive_all(socket, nonces.server.data(), nonces.server.size()) ||
      !receive_all(socket, proof.data(), proof.size())) {
    return Greeted::kSilent;
  }
  if (!are_same(proof, token.proof_of(Side::kServer, nonces))) {
    return Greeted::kUnknown;
  }
  const Bytes32 own = token.proof_of(Side::kClient, nonces);
  const std::string answer(own.begin(), own.end());
  return send_all(socket, answer) ? Greeted::kKnown : Greeted::kSilent;
}

// The next message; nullopt: the connection is closed, or brings another one.
std::optional<std::string> receive_sealed(int socket, Seal& came) {
  std::string length(kSealedLength, '\0');
  if (!receive_all(socket, length.data(), length.size())) return std::nullopt;
  const auto size = size_after(came, length);
  if (!size) return std::nullopt;
  std::string sealed(*size, '\0');
  if (!receive_all(socket, sealed.data(), sealed.size())) return std::nullopt;
  return came.open(sealed);
}

}  // namespace

TokenStore::TokenStore(TokenStoreOptions options)
    : Store(options.timeout), options_(std::move(options)) {
  const auto end = Clock::now() + options_.timeout;
  std::random_device random;
  std::string why;
  while (!try_to_connect(why)) {
    if (Clock::now() > end) C10_THROW_ERROR(DistNetworkError, why);
    // Ranks that came at once and found no room come apart again.
    std::this_thread::sleep_for(kBetweenTries * (1 + random() % 3));
  }
}

bool TokenStore::try_to_connect(std::string& why) {
  socket_ = connect_to(options_.host, options_.port, why);
  if (!socket_.open()) return false;
  Nonces nonces;
  const Greeted greeted = greet(socket_.get(), options_.token, nonces);
  sent_ = options_.token.seal_of(Side::kClient, nonces);
  came_ = options_.token.seal_of(Side::kServer, nonces);
  // It may have had no room for this one.
  if (greeted == Greeted::kKnown && receive_sealed(socket_.get(), *came_)) {
    set_time_out(socket_.get(), seconds(0));  // none: a wait may be long
    return true;
  }
  socket_ = Fd();
  TS_CHECK_REACH(greeted != Greeted::kUnknown, "launch: what listens at ",
                 options_.host, ":", options_.port,
                 " does not know this job's token: it is another job's, or no "
                 "rendezvous, or the hosts' files of TESSERA_TOKEN_FILE "
                 "differ.");
  why = "what listens there does not greet as a store with a token does";
  return false;
}

c10::intrusive_ptr<c10d::Store> TokenStore::clone() {
  auto copy = c10::make_intrusive<TokenStore>(options_);
  copy->setTimeout(timeout_);
  return copy;
}

std::optional<std::string> TokenStore::ask(const MessageWriter& request) {
  TS_CHECK(request.text().size() <= kMostBytes, "the rendezvous takes ",
           kMostBytes, " bytes at a time, not ", request.text().size(), ".");
  const std::lock_guard lock(mutex_);
  std::optional<std::string> message;
  if (send_all(socket_.get(), sealed_pieces(*sent_, request.text()))) {
    message = receive_sealed(socket_.get(), *came_);
  }
  if (!message || message->empty()) {
    // Out of step with the other end it is of no more use.
    shutdown(socket_.get(), SHUT_RDWR);
    C10_THROW_ERROR(DistNetworkError,
                    "the connection to the rendezvous was closed, or brings "
                    "what the store did not say");
  }
  if (MessageReader(*message).word() ==
      static_cast<uint8_t>(Answer::kTimedOut)) {
    return std::nullopt;
  }
  return message->substr(1);
}

int64_t TokenStore::ask_number(const MessageWriter& request) {
  const std::string fields = ask(request).value();
  return MessageReader(fields).number().value();
}

std::vector<uint8_t> TokenStore::ask_bytes(const MessageWriter& request,
                                           const std::string& key) {
  const auto fields = ask(request);
  if (!fields) {
    C10_THROW_ERROR(
        DistStoreError,
        c10::str("wait timeout after ", timeout_.count(), "ms, keys: ", key));
  }
  return bytes_of(MessageReader(*fields).bytes().value());
}

void TokenStore::set(const std::string& key,
                     const std::vector<uint8_t>& value) {
  ask(MessageWriter(Request::kSet).add(key).add(text_of(value)));
}

std::vector<uint8_t> TokenStore::compareSet(
    const std::string& key, const std::vector<uint8_t>& expected,
    const std::vector<uint8_t>& desired) {
  return ask_bytes(MessageWriter(Request::kCompareSet)
                       .add(key)
                       .add(text_of(expected))
                       .add(text_of(desired)),
                   key);
}

std::vector<uint8_t> TokenStore::get(const std::string& key) {
  return ask_bytes(MessageWriter(Request::kGet)
                       .add(static_cast<int64_t>(timeout_.count()))
                       .add(key),
                   key);
}

int64_t TokenStore::add(const std::string& key, int64_t value) {
  return ask_number(MessageWriter(Request::kAdd).add(key).add(value));
}

bool TokenStore::deleteKey(const std::string& key) {
  return ask_number(MessageWriter(Request::kDelete).add(key)) != 0;
}

bool TokenStore::check(const std::vector<std::string>& keys) {
  MessageWriter request(Request::kCheck);
  for (const std::string& key : keys) request.add(key);
  return ask_number(request) != 0;
}

int64_t TokenStore::getNumKeys() {
  return ask_number(MessageWriter(Request::kCount));
}

void TokenStore::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}

void TokenStore::wait(const std::vector<std::string>& keys,
                      const milliseconds& timeout) {
  if (keys.empty()) return;
  MessageWriter request(Request::kWait);
  request.add(static_cast<int64_t>(timeout.count()));
  for (const std::string& key : keys) request.add(key);
  if (ask(request)) return;
  C10_THROW_ERROR(DistStoreError,
                  c10::str("wait timeout after ", timeout.count(),
                           "ms, keys: ", c10::Join(", ", keys)));
}

}  // namespace tessera::launch::detail
