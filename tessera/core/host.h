// What this host is called.
#pragma once

#include <string>

namespace tessera {

// As gethostname(2) has it; "localhost" where it has nothing.
std::string host_name();

}  // namespace tessera
