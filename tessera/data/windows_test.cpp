#include "tessera/data/windows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tessera/core/files.h"
#include "tessera/core/ignore_index.h"

namespace tessera::data {
namespace {

std::vector<int64_t> values_of(const at::Tensor& ids) {
  const at::Tensor flat = ids.reshape(-1);
  return {flat.const_data_ptr<int64_t>(),
          flat.const_data_ptr<int64_t>() + flat.numel()};
}

class WindowsTest : public ::testing::Test {
 protected:
  // The ids 0, 1, ... count - 1.
  TokenStream stream(int64_t count) {
    std::string bytes;
    for (int64_t id = 0; id < count; ++id) {
      bytes += {static_cast<char>(id), '\0'};
    }
    write_file_atomic(folder_.file("ids.u16"), bytes);
    return open_tokens({.paths = {folder_.file("ids.u16")}, .vocab_size = 100});
  }

  const TemporaryFolder folder_;
};

TEST_F(WindowsTest, EveryTokenButTheFirstIsATargetOnce) {
  for (const int64_t tokens : {2, 5, 6, 7, 21, 23, 31}) {
    SCOPED_TRACE(tokens);
    const TokenStream stream = this->stream(tokens);
    const Windows windows(stream, /*seq_len=*/5, /*batch=*/3, false);
    std::vector<int64_t> inputs, targets;
    for (int64_t i = 0; i < windows.count(); ++i) {
      const Batch batch = windows.read(i);
      EXPECT_EQ(batch.inputs.sizes(), batch.targets.sizes());
      EXPECT_LE(batch.inputs.size(0), 3);
      EXPECT_LE(batch.inputs.size(1), 5);
      for (const int64_t id : values_of(batch.inputs)) inputs.push_back(id);
      for (const int64_t id : values_of(batch.targets)) targets.push_back(id);
    }
    ASSERT_EQ(std::ssize(targets), tokens - 1);
    for (int64_t i = 0; i < tokens - 1; ++i) {
      EXPECT_EQ(inputs[i], i);
      EXPECT_EQ(targets[i], i + 1);
    }
  }
}

TEST_F(WindowsTest, TheLastIsFilledUpWhereRanksCutIt) {
  const TokenStream stream = this->stream(23);
  const Windows windows(stream, /*seq_len=*/5, /*batch=*/3, true);
  ASSERT_EQ(windows.count(), 3);
  EXPECT_EQ(windows.read(0).inputs.sizes(), (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(windows.read(1).inputs.sizes(), (std::vector<int64_t>{1, 5}));
  EXPECT_EQ(windows.read(1).unpadded, 0);
  const Batch last = windows.read(2);
  EXPECT_EQ(values_of(last.inputs), (std::vector<int64_t>{20, 21, 0, 0, 0}));
  EXPECT_EQ(
      values_of(last.targets),
      (std::vector<int64_t>{21, 22, kIgnoreIndex, kIgnoreIndex, kIgnoreIndex}));
  EXPECT_EQ(last.unpadded, 2);
}

}  // namespace
}  // namespace tessera::data
