// Text that comes from standard input.
#pragma once

#include <string>

namespace tessera::cli {

// All of it. TS_CHECK_IO where reading fails: then it is not whole.
std::string read_standard_input();

}  // namespace tessera::cli
