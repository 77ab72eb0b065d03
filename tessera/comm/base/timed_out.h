// What a backend throws when a peer did not come in time.
#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace tessera::comm {

class TimedOut : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

// Of a peer's failure, as it told of it: whether it was such a one.
inline bool tells_of_time_out(const std::string& failure) {
  return failure.find("timed out. ") != std::string::npos;
}

}  // namespace tessera::comm
