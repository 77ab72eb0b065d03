#include "tessera/core/exit_code.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <new>
#include <system_error>

namespace tessera {
namespace {

TEST(ExitCode, OfEachException) {
  const c10::SourceLocation here{};
  EXPECT_EQ(exit_code_of(Error(ExitCode::kConfig, "")), ExitCode::kConfig);
  EXPECT_EQ(exit_code_of(c10::DistError(here, "")), ExitCode::kUnreachable);
  EXPECT_EQ(exit_code_of(c10::Error(here, "")), ExitCode::kFailed);
  const auto full = std::make_error_code(std::errc::no_space_on_device);
  EXPECT_EQ(exit_code_of(std::filesystem::filesystem_error("", full)),
            ExitCode::kInputOutput);
  EXPECT_EQ(exit_code_of(std::system_error(full)), ExitCode::kFailed);
  EXPECT_EQ(exit_code_of(std::bad_alloc()), ExitCode::kFailed);
}

}  // namespace
}  // namespace tessera
