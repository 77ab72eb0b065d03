#include "tessera/core/file_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tests/support/disk.h"

namespace tessera {
namespace {

constexpr int64_t kElements = int64_t{1} << 20;  // 4 MiB of a part
constexpr int64_t kBytes = 4 * kElements;

TEST(FileMemory, KeepsWhatItLetsGoOf) {
  const TemporaryFolder folder = tests::folder_on_disk();
  FileMemory memory(folder.path(), "Free some.");
  std::vector<at::Tensor> tensors;
  for (int64_t part = 0; part < 4; ++part) {
    tensors.push_back(memory.zeros(part, {kElements}, at::kFloat));
    EXPECT_EQ(tensors.back().count_nonzero().item<int64_t>(), 0);
    tensors.back().fill_(static_cast<float>(part + 1));
  }
  EXPECT_EQ(memory.bytes(), 4 * kBytes);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  memory.release_all();
  EXPECT_LE(memory.resident_bytes(), kBytes / 10);
  for (int64_t part = 0; part < 4; ++part) {
    memory.fetch(part, FileMemory::Use::kWrite);
    memory.await(part);
    EXPECT_GE(memory.resident_bytes(), kBytes);
    tensors[part].add_(1);
    memory.release(part);
  }
  memory.release_all();
  EXPECT_LE(memory.resident_bytes(), kBytes / 10);
  for (int64_t part = 0; part < 4; ++part) {
    EXPECT_TRUE(
        (tensors[part] == static_cast<float>(part + 2)).all().item<bool>());
  }
}

// As a program has them: each is fetched before the one before it is used.
TEST(FileMemory, TwoPartsAreThereAtATime) {
  const TemporaryFolder folder = tests::folder_on_disk();
  FileMemory memory(folder.path(), "Free some.");
  constexpr int64_t kParts = 8;
  std::vector<at::Tensor> tensors;
  for (int64_t part = 0; part < kParts; ++part) {
    tensors.push_back(memory.zeros(part, {kElements}, at::kFloat));
  }
  memory.release_all();
  memory.fetch(0, FileMemory::Use::kWrite);
  for (int64_t part = 0; part < kParts; ++part) {
    memory.await(part);
    if (part + 1 < kParts) memory.fetch(part + 1, FileMemory::Use::kWrite);
    tensors[part].add_(1);
    EXPECT_LE(memory.resident_bytes(), 2.05 * kBytes) << part;
    memory.release(part);
  }
}

TEST(FileMemory, GivesBackWithTheTensor) {
  const TemporaryFolder folder = tests::folder_on_disk();
  FileMemory memory(folder.path(), "Free some.");
  at::Tensor first = memory.zeros(0, {kElements}, at::kFloat);
  at::Tensor other = memory.zeros(1, {kElements}, at::kFloat);
  first.fill_(1);
  other.fill_(2);
  first = at::Tensor();
  EXPECT_LE(memory.resident_bytes(), 1.05 * kBytes);
  EXPECT_TRUE((other == 2).all().item<bool>());
}

TEST(FileMemory, TensorsOutliveIt) {
  const TemporaryFolder folder = tests::folder_on_disk();
  at::Tensor tensor;
  {
    FileMemory memory(folder.path(), "Free some.");
    tensor = memory.zeros(0, {kElements}, at::kFloat);
  }
  tensor.fill_(3);
  EXPECT_EQ(tensor.max().item<float>(), 3);
}

TEST(FileMemory, RefusesByName) {
  const auto complaint = [](const auto& act) -> std::string {
    try {
      act();
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kInputOutput);
      return message_of(error);
    }
    return "";
  };
  const TemporaryFolder folder = tests::folder_on_disk();
  EXPECT_NE(complaint([&] { FileMemory(folder.file("none"), "Free some."); })
                .find("no file can be made in it: No such file or directory. "
                      "Free some."),
            std::string::npos);
  FileMemory memory(folder.path(), "Free some.");
  const std::string full =
      complaint([&] { memory.zeros(0, {int64_t{1} << 50}, at::kFloat); });
  EXPECT_NE(full.find("need 4.0 PiB more"), std::string::npos) << full;
  EXPECT_NE(full.find("are free: No space left on device. Free some."),
            std::string::npos)
      << full;
}

}  // namespace
}  // namespace tessera
