#include "tessera/core/error.h"

#include <new>
#include <utility>

namespace tessera {

Error::Error(ExitCode code, const std::string& message,
             c10::SourceLocation where)
    : c10::Error(where, message), code_(code) {}

std::string message_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  if (c10_error) return c10_error->what_without_backtrace();
  const std::string words = error.what();
  return words == std::bad_alloc().what() ? "out of memory" : words;
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return message_of(e);
  }
}

std::string RankContext::prefix() const {
  std::string text;
  if (rank >= 0 && world_size > 1) {
    text += " rank " + std::to_string(rank) + "/" + std::to_string(world_size);
  }
  if (!coords.empty()) text += " " + coords;
  if (step >= 0) text += " step=" + std::to_string(step);
  return text.empty() ? "" : "[" + text.substr(1) + "] ";
}

RankContext& rank_context() {
  thread_local RankContext context;
  return context;
}

RankContextGuard::RankContextGuard(RankContext context)
    : saved_(std::exchange(rank_context(), std::move(context))) {}

RankContextGuard::~RankContextGuard() { rank_context() = std::move(saved_); }

void detail::throw_error(ExitCode code, const std::string& message,
                         c10::SourceLocation where) {
  throw Error(code, rank_context().prefix() + message, where);
}

}  // namespace tessera
