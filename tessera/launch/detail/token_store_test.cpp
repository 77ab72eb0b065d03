// The store of a job with a token: what ranks find in it, and strangers do not.
#include "tessera/launch/detail/token_store.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tests/support/failure_of.h"
#include "tests/support/listener.h"

namespace tessera::launch::detail {
namespace {

using std::chrono::milliseconds, std::chrono::seconds;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::Listener;

constexpr std::string_view kSecret = "0123456789abcdef0123456789abcdef";

int connected_to(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address),
            0);
  return fd;
}

// What comes until the other end closes, or nothing for ten seconds.
std::string heard_from(int socket) {
  const timeval limit{.tv_sec = 10, .tv_usec = 0};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  std::string all, some(4096, '\0');
  while (true) {
    const ssize_t got = recv(socket, some.data(), some.size(), 0);
    if (got <= 0) return all;
    all.append(some, 0, static_cast<size_t>(got));
  }
}

class TokenStoreTest : public ::testing::Test {
 protected:
  TokenStoreTest() {
    Listener free(/*listening=*/false);
    port = free.port;
    server = std::make_shared<StoreServer>(free.release(), JobToken(kSecret));
  }

  c10::intrusive_ptr<c10d::Store> rank(
      uint16_t at, std::string_view secret = kSecret,
      milliseconds timeout = seconds(5)) const {
    return c10::make_intrusive<TokenStore>(
        TokenStoreOptions{.host = "127.0.0.1",
                          .port = at,
                          .token = JobToken(secret),
                          .timeout = timeout});
  }

  uint16_t port = 0;
  std::shared_ptr<StoreServer> server;
};

// What a store answers to one of each call.
std::vector<std::string> answers_of(c10d::Store& store) {
  std::vector<std::string> said;
  const auto say = [&](const auto& what) { said.push_back(c10::str(what)); };
  say(store.check({"a"}));
  store.set("a", "1");
  say(store.get_to_str("a"));
  say(store.check({"a", "b"}));
  say(store.add("sum", 5));
  say(store.add("sum", -7));
  say(store.get_to_str("sum"));
  say(store.compareSet("a", "2", "3"));
  say(store.compareSet("a", "1", "3"));
  say(store.get_to_str("a"));
  say(store.compareSet("new", "x", "y"));
  say(store.check({"new"}));
  say(store.compareSet("new", "", std::string("\0y", 2)));
  say(store.get_to_str("new"));
  say(store.deleteKey("a"));
  say(store.deleteKey("a"));
  store.wait({"new", "sum"}, seconds(1));
  store.set("empty", "");
  say(store.get_to_str("empty").size());
  store.set("long", std::string(3000000, 'l'));
  say(store.get_to_str("long").size());
  return said;
}

TEST_F(TokenStoreTest, AnswersAsTheStoreOfC10dDoes) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  c10d::TCPStore theirs("127.0.0.1", options);
  const auto ours = rank(port);
  EXPECT_EQ(answers_of(*ours), answers_of(theirs));
  EXPECT_EQ(ours->getNumKeys(), 4);
}

TEST_F(TokenStoreTest, AWaitEndsWhenTheLastKeyIsThereOrTheTimeIsOver) {
  const auto one = rank(port), other = rank(port);
  one->set("a", "1");
  std::thread sets([&] {
    std::this_thread::sleep_for(milliseconds(100));
    other->set("b", "2");
  });
  one->wait({"a", "b"}, seconds(5));
  sets.join();
  EXPECT_EQ(one->get_to_str("b"), "2");
  EXPECT_THROW(one->wait({"a", "c"}, milliseconds(50)), c10::DistStoreError);
  const auto copy = one->clone();
  copy->setTimeout(milliseconds(50));
  EXPECT_THROW(copy->get("c"), c10::DistStoreError);
  EXPECT_EQ(copy->get_to_str("a"), "1") << "it goes on after that";
}

TEST_F(TokenStoreTest, RanksOfAJobMayComeAtOnceAndManyTimes) {
  std::vector<std::thread> ranks;
  ranks.reserve(100);
  for (int i = 0; i < 100; ++i) {
    ranks.emplace_back([&] {
      const auto store = rank(port);
      for (int times = 0; times < 10; ++times) store->add("sum", 1);
      store->clone()->add("sum", 1);
    });
  }
  for (std::thread& each : ranks) each.join();
  EXPECT_EQ(rank(port)->add("sum", 0), 1100);
}

TEST_F(TokenStoreTest, TellsARankThatTheServerHasAnotherToken) {
  EXPECT_THAT(
      failure_of([&] { rank(port, "fedcba9876543210fedcba9876543210"); }),
      HasSubstr("does not know this job's token"));
}

TEST_F(TokenStoreTest, ARankThatComesFirstWaitsForTheServer) {
  Listener free(/*listening=*/false);
  std::optional<StoreServer> late;
  std::thread begins([&] {
    std::this_thread::sleep_for(milliseconds(250));
    late.emplace(free.release(), JobToken(kSecret));
  });
  EXPECT_FALSE(rank(free.port)->check({"a"}));
  begins.join();
}

// As a server does that lets it go where it has no room.
TEST_F(TokenStoreTest, ARankThatIsLetGoAfterItsProofComesAgain) {
  Listener first(/*listening=*/true);
  std::optional<StoreServer> then;
  std::thread serves([&] {
    const int fd = accept(first.fd, nullptr, nullptr);
    std::string hello(kHello.size() + sizeof(Bytes32), '\0');
    recv(fd, hello.data(), hello.size(), MSG_WAITALL);
    Nonces nonces{.server = draw_nonce()};
    std::copy(hello.begin() + kHello.size(), hello.end(),
              nonces.client.begin());
    const JobToken token(kSecret);
    const Bytes32 proof = token.proof_of(JobToken::Side::kServer, nonces);
    send(fd, nonces.server.data(), nonces.server.size(), MSG_NOSIGNAL);
    send(fd, proof.data(), proof.size(), MSG_NOSIGNAL);
    Bytes32 answer;
    recv(fd, answer.data(), answer.size(), MSG_WAITALL);
    close(fd);
    then.emplace(first.release(), token);
  });
  const auto store = rank(first.port);
  serves.join();
  EXPECT_FALSE(store->check({"a"}));
}

TEST_F(TokenStoreTest, AWaitEndsWithTheServer) {
  const auto store = rank(port);
  std::thread ends([&] {
    std::this_thread::sleep_for(milliseconds(100));
    server.reset();
  });
  EXPECT_THROW(store->wait({"never"}, seconds(5)), c10::DistNetworkError);
  ends.join();
}

TEST_F(TokenStoreTest, SaysWhyItDidNotConnect) {
  const auto reach = [&](const char* host, uint16_t at) -> std::string {
    try {
      c10::make_intrusive<TokenStore>(
          TokenStoreOptions{.host = host,
                            .port = at,
                            .token = JobToken(kSecret),
                            .timeout = milliseconds(50)});
    } catch (const c10::DistNetworkError& error) {
      return error.what_without_backtrace();
    }
    return "it was reached";
  };
  EXPECT_THAT(reach("no-such-host.invalid", port), HasSubstr("is not known"));
  const uint16_t free = Listener(/*listening=*/false).port;
  EXPECT_THAT(reach("127.0.0.1", free), HasSubstr("Connection refused"));
}

TEST_F(TokenStoreTest, WhoServesSomethingElseIsNoStore) {
  const Listener mute(/*listening=*/true);
  EXPECT_THROW(rank(mute.port, kSecret, milliseconds(200)),
               c10::DistNetworkError);
}

TEST_F(TokenStoreTest, AnOrdinaryClientOfC10dIsLetGo) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;
  options.timeout = seconds(1);
  const auto enter = [&] {
    const c10::intrusive_ptr<c10d::Store> store =
        c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    store->set("a", "1");
  };
  EXPECT_THROW(enter(), c10::Error);
  EXPECT_FALSE(rank(port)->check({"a"}));
}

TEST_F(TokenStoreTest, WhoSaysNothingIsLetGoAndKeepsNobodyOut) {
  std::vector<int> idle;
  for (int i = 0; i < 300; ++i) idle.push_back(connected_to(port));
  const auto begin = std::chrono::steady_clock::now();
  rank(port)->set("a", "1");
  EXPECT_EQ(heard_from(idle.back()), "");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(9));
  for (const int each : idle) close(each);
}

// With what any stranger can make, a guess, the store's own proof sent back to
// it, and more: all but one bit of the proof. What they ask for is sealed as a
// rank would, so that it is the proof alone that keeps them out.
TEST_F(TokenStoreTest, NoneOfTenThousandStrangersGetsIn) {
  const auto try_to_enter = [&](int number) {
    const int fd = connected_to(port);
    const Bytes32 nonce = draw_nonce();
    std::string hello(kHello);
    hello.append(nonce.begin(), nonce.end());
    send(fd, hello.data(), hello.size(), MSG_NOSIGNAL);
    std::array<char, 64> greeting{};
    EXPECT_EQ(recv(fd, greeting.data(), greeting.size(), MSG_WAITALL), 64);
    Nonces nonces{.client = nonce};
    std::copy_n(greeting.begin(), 32, nonces.server.begin());
    Bytes32 proof = draw_nonce();
    if (number % 3 == 1) std::copy_n(greeting.begin() + 32, 32, proof.begin());
    if (number % 3 == 2) {
      proof = JobToken(kSecret).proof_of(JobToken::Side::kClient, nonces);
      proof[number / 3 % 32] ^= 1U << (number % 8);
    }
    std::string said(proof.begin(), proof.end());
    Seal seal = JobToken(kSecret).seal_of(JobToken::Side::kClient, nonces);
    said += sealed_pieces(
        seal, MessageWriter(Request::kSet).add("stranger").add("1").text());
    send(fd, said.data(), said.size(), MSG_NOSIGNAL);
    char more = 0;
    const bool was_closed = recv(fd, &more, 1, 0) <= 0;
    close(fd);
    return was_closed;
  };
  std::vector<std::thread> strangers;
  std::atomic<int> let_go = 0;
  for (int thread = 0; thread < 4; ++thread) {
    strangers.emplace_back([&, thread] {
      for (int i = thread; i < 10000; i += 4) let_go += try_to_enter(i);
    });
  }
  for (std::thread& each : strangers) each.join();
  EXPECT_EQ(let_go, 10000);
  EXPECT_EQ(rank(port)->getNumKeys(), 0);
}

// Between a rank and the store: keeps what the rank says, and may change what
// both do.
class Between {
 public:
  using Change = std::function<void(std::string& piece, bool by_rank)>;

  Between(uint16_t store, Change change)
      : change_(std::move(change)), thread_([this, store] { relay(store); }) {}
  ~Between() {
    shutdown(listener_.fd, SHUT_RDWR);
    thread_.join();
  }

  uint16_t port() const { return listener_.port; }
  std::string said;  // by the rank

 private:
  void relay(uint16_t store) {
    const int rank = accept(listener_.fd, nullptr, nullptr);
    if (rank < 0) return;
    const int server = connected_to(store);
    std::thread back([&] { pass_on(server, rank, /*by_rank=*/false); });
    pass_on(rank, server, /*by_rank=*/true);
    back.join();
    close(rank);
    close(server);
  }

  void pass_on(int from, int to, bool by_rank) {
    std::string some(4096, '\0');
    ssize_t got = 0;
    while ((got = recv(from, some.data(), some.size(), 0)) > 0) {
      std::string piece = some.substr(0, static_cast<size_t>(got));
      if (by_rank) said += piece;
      change_(piece, by_rank);
      send(to, piece.data(), piece.size(), MSG_NOSIGNAL);
    }
    shutdown(to, SHUT_RDWR);
  }

  const Listener listener_{/*listening=*/true};
  const Change change_;
  std::thread thread_;
};

TEST_F(TokenStoreTest, WhatARankSaidCanNeitherBeReadNorRepeated) {
  Between listener(port, [](std::string&, bool) {});
  {
    const auto store = rank(listener.port());
    store->set("a secret key", "a secret value");
    store->add("sum", 1);
  }
  EXPECT_THAT(listener.said, ::testing::Not(HasSubstr("secret")));
  const int fd = connected_to(port);
  send(fd, listener.said.data(), listener.said.size(), MSG_NOSIGNAL);
  EXPECT_EQ(heard_from(fd).size(), 64U) << "more than a greeting";
  close(fd);
  EXPECT_EQ(rank(port)->add("sum", 0), 1);
}

// Any bit: of a message's length, its tag, its key, the key's content; of what
// a rank says and of what it hears.
TEST_F(TokenStoreTest, WhatIsChangedOnTheWayIsNotTaken) {
  for (const bool of_rank : {true, false}) {
    for (const size_t at : {0U, 1U, 3U, 4U, 19U, 20U, 36U}) {
      std::atomic<bool> changes = false;
      Between liar(port, [&](std::string& piece, bool by_rank) {
        if (changes && by_rank == of_rank) piece.at(at) ^= 1;
      });
      const auto store = rank(liar.port());
      store->set("before", "1");
      changes = true;
      EXPECT_THROW(store->set("after", "2"), c10::DistNetworkError);
      EXPECT_THROW(store->check({"before"}), c10::DistNetworkError);
      EXPECT_TRUE(rank(port)->check({"before"}));
      EXPECT_EQ(rank(port)->deleteKey("after"), !of_rank) << at;
    }
  }
}

TEST_F(TokenStoreTest, RefusesWhatIsLargerThanAMessageMayBe) {
  const auto store = rank(port);
  EXPECT_THAT(failure_of([&] { store->set("a", std::string(65 << 20, 'a')); }),
              HasSubstr("the rendezvous takes 67108864 bytes at a time"));
  store->set("a", "1");
}

TEST(JobToken, IsReadFromAFileOfItsOwnerAlone) {
  const TemporaryFolder folder;
  const std::filesystem::path path = folder.file("token");
  const auto write = [&](const std::string& text, mode_t mode) {
    std::ofstream(path) << text;
    chmod(path.c_str(), mode);
  };
  const auto said = [&] {
    return failure_of([&] { JobToken::of_file(path); });
  };
  EXPECT_THAT(said(), HasSubstr("No such file"));
  write(std::string(kSecret) + "\n", 0600);
  const Nonces nonces{.client = draw_nonce(), .server = draw_nonce()};
  EXPECT_TRUE(are_same(
      JobToken::of_file(path).proof_of(JobToken::Side::kClient, nonces),
      JobToken(kSecret).proof_of(JobToken::Side::kClient, nonces)));
  for (const mode_t mode : {0640, 0604, 0660}) {
    write(std::string(kSecret), mode);
    EXPECT_THAT(said(), HasSubstr("is open to other users"));
  }
  write("too short\n", 0600);
  EXPECT_THAT(said(), HasSubstr("holds 9 characters"));
}

// The values of RFC 4231 (case 2) and RFC 8439 are libsodium's to keep; that a
// seal is of one direction, one place in it and one connection is ours.
TEST(Seal, OpensTheNextMessageOfItsDirectionAlone) {
  const JobToken token(kSecret);
  const Nonces nonces{.client = draw_nonce(), .server = draw_nonce()};
  const auto seal = [&](JobToken::Side side) {
    return token.seal_of(side, nonces);
  };
  Seal said = seal(JobToken::Side::kClient);
  const std::string first = said.close("one"), second = said.close("two");
  Seal heard = seal(JobToken::Side::kClient);
  EXPECT_EQ(heard.open(first), "one");
  EXPECT_EQ(heard.open(second), "two");
  EXPECT_EQ(seal(JobToken::Side::kClient).open(second), std::nullopt);
  EXPECT_EQ(seal(JobToken::Side::kServer).open(first), std::nullopt);
  EXPECT_EQ(seal(JobToken::Side::kClient).open(""), std::nullopt);
  const Nonces others{.client = nonces.client, .server = draw_nonce()};
  EXPECT_EQ(token.seal_of(JobToken::Side::kClient, others).open(first),
            std::nullopt);
}

}  // namespace
}  // namespace tessera::launch::detail
