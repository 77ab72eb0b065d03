// What this host is called, and what it computes with.
#pragma once

#include <string>

namespace tessera {

// As gethostname(2) has it; "localhost" where it has nothing.
std::string host_name();

// As /proc/cpuinfo has it; "an unknown processor" where it has nothing.
std::string processor_name();

}  // namespace tessera
