// What an exception says, without a stack trace.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace tessera::comm {

inline std::string message_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  return c10_error ? c10_error->what_without_backtrace() : error.what();
}

inline std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return message_of(e);
  }
}

}  // namespace tessera::comm
