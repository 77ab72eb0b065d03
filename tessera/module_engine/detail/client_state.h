// The text of a user's own that goes with a checkpoint.
#pragma once

#include <string>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::detail {

// REQUIRES, else TS_CHECK_CONFIG: text that a manifest can hold.
inline void check_client_state(const std::string& text) {
  TS_CHECK_CONFIG(is_utf8(text),
                  "client_state is not UTF-8, and a checkpoint's manifest is "
                  "JSON. Write bytes, as of torch::save(), in base64.");
}

}  // namespace tessera::detail
