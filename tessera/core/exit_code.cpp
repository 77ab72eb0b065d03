#include "tessera/core/exit_code.h"

#include <filesystem>

namespace tessera {

ExitCode exit_code_of(const std::exception& error) {
  if (const auto* ours = dynamic_cast<const Error*>(&error)) {
    return ours->exit_code();
  }
  if (dynamic_cast<const c10::DistError*>(&error) != nullptr) {
    return ExitCode::kUnreachable;
  }
  const auto* of_files =
      dynamic_cast<const std::filesystem::filesystem_error*>(&error);
  return of_files != nullptr ? ExitCode::kInputOutput : ExitCode::kFailed;
}

}  // namespace tessera
