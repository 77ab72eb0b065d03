#include "cli/standard_input.h"

#include <cstdio>
#include <iostream>
#include <iterator>

#include "tessera/core/error.h"

namespace tessera::cli {

std::string read_standard_input() {
  std::string text{std::istreambuf_iterator<char>(std::cin), {}};
  // The stream reads by stdin, and takes an error for the end.
  TS_CHECK_IO(std::ferror(stdin) == 0, "standard input: reading failed after ",
              text.size(), " bytes; nothing was done with them.");
  return text;
}

}  // namespace tessera::cli
