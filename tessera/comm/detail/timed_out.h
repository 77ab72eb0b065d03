// What a backend throws when a peer did not come in time.
#pragma once

#include <c10/util/Exception.h>

namespace tessera::comm {

class TimedOut : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

}  // namespace tessera::comm
