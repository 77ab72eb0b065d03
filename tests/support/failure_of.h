// What an action fails with.
#pragma once

#include <functional>
#include <string>

#include "tessera/core/error.h"

namespace tessera::testing {

// The words of a tessera::Error; "" where there is none.
inline std::string failure_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace tessera::testing
