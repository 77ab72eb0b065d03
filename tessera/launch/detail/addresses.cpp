#include "tessera/launch/detail/addresses.h"

#include "tessera/core/error.h"

namespace tessera::launch::detail {

AddressList addresses_of(const std::string& host, uint16_t port, int type) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  TS_CHECK_REACH(error == 0, "launch: MASTER_ADDR=", host,
                 " is not known: ", gai_strerror(error),
                 ". Use an address or a name that every host resolves.");
  return AddressList(found, &freeaddrinfo);
}

std::string in_numbers(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST] = "";
  const int error =
      getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text : "";
}

}  // namespace tessera::launch::detail
