#include "tessera/comm/mpi/check.h"

#include <mpi.h>

#include <array>

#include <c10/util/Exception.h>

namespace tessera::comm::mpi {

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> words{};
  int length = 0;
  MPI_Error_string(code, words.data(), &length);
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(call, " failed: ", std::string(words.data(), length)));
}

}  // namespace tessera::comm::mpi
