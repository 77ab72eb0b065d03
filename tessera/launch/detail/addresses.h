// What the system knows a host's name as.
#pragma once

#include <netdb.h>

#include <cstdint>
#include <memory>
#include <string>

namespace tessera::launch::detail {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// For sockets of this type (SOCK_STREAM, SOCK_DGRAM).
// Errors: 69 for a name that is not known.
AddressList addresses_of(const std::string& host, uint16_t port, int type);

}  // namespace tessera::launch::detail
