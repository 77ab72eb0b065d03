// A socket of 127.0.0.1 at a port that was free.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

namespace tessera::testing {

struct Listener {
  explicit Listener(bool listening)
      : fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(fd, generic, size), 0);
    EXPECT_EQ(listening ? listen(fd, 8) : 0, 0);
    EXPECT_EQ(getsockname(fd, generic, &size), 0);
    port = ntohs(address.sin_port);
  }
  ~Listener() {
    if (fd >= 0) close(fd);
  }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  int release() { return std::exchange(fd, -1); }  // to who closes it

  int fd;
  uint16_t port = 0;
};

}  // namespace tessera::testing
