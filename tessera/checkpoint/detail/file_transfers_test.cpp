#include "tessera/checkpoint/detail/file_transfers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tessera/comm/communicator.h"
#include "tessera/core/files.h"

namespace tessera::checkpoint::detail {
namespace {

namespace fs = std::filesystem;
using comm::Communicator;
using comm::run_threads;
using ::testing::HasSubstr;

// Of a file that is not there, and to a place that cannot be written: nobody
// waits, the next one comes through.
TEST(FileTransfers, WhatFailsIsTold) {
  const TemporaryFolder temporary;
  const auto there = [&](int64_t rank) {
    return temporary.file("rank-" + std::to_string(rank));
  };
  const std::string text(40 << 20, 'x');  // three messages
  for (const int64_t rank : {0, 1}) fs::create_directory(there(rank));
  std::ofstream(there(0) + "/good") << text;
  std::ofstream(there(0) + "/blocked") << text;
  fs::create_directories(there(1) + "/blocked.tmp/x");
  std::ofstream(there(0) + "/changed") << "y" << text.substr(1);
  const auto transfer = [&](const std::string& name) {
    return FileTransfer{.name = name,
                        .bytes = std::ssize(text),
                        .hash = hash128(text),
                        .sender = 0,
                        .receiver = 1};
  };
  run_threads(2, "shm", [&](Communicator& all) {
    const auto said = [&](const std::vector<FileTransfer>& transfers) {
      return transfer_files(all.world(), there(all.rank()), transfers);
    };
    EXPECT_THAT(said({transfer("absent"), transfer("good")}),
                HasSubstr("absent"));
    EXPECT_THAT(said({transfer("blocked")}), HasSubstr("blocked.tmp"));
    EXPECT_THAT(said({transfer("changed")}),
                HasSubstr("came from rank 0 with XXH3"));
  });
  EXPECT_EQ(read_file(there(1) + "/good"), text);
  EXPECT_FALSE(fs::exists(there(1) + "/absent"));
  EXPECT_FALSE(fs::exists(there(1) + "/changed"));
}

}  // namespace
}  // namespace tessera::checkpoint::detail
