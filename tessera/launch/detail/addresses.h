// Names of hosts, and their addresses in numbers.
#pragma once

#include <netdb.h>
#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <string>

namespace tessera::launch::detail {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// For sockets of this type (SOCK_STREAM, SOCK_DGRAM).
// Errors: 69 for a name that is not known.
AddressList addresses_of(const std::string& host, uint16_t port, int type);

// "10.0.0.7", or "" of what is no address.
std::string in_numbers(const sockaddr* address, socklen_t size);

}  // namespace tessera::launch::detail
