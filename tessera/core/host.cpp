#include "tessera/core/host.h"

#include <unistd.h>

namespace tessera {

std::string host_name() {
  char name[256] = {};  // one more than Linux allows, for the closing zero
  const bool known = gethostname(name, sizeof name - 1) == 0 && name[0] != '\0';
  return known ? name : "localhost";
}

}  // namespace tessera
