#include "tessera/checkpoint/safetensors.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "tessera/core/crc32c.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

std::span<const std::byte> bytes_of(std::string_view file, int64_t begin,
                                    int64_t size) {
  return std::as_bytes(std::span(file.substr(begin, size)));
}

class SafetensorsTest : public ::testing::Test {
 protected:
  // A file of this header text and so many bytes of data.
  void write(const std::string& header, size_t data_bytes) {
    const uint64_t length = header.size();
    std::ofstream out(path_, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), 8);
    out << header << std::string(data_bytes, 'x');
  }

  // What the reader says about such a file; "" where it takes it.
  std::string verdict() {
    try {
      SafetensorsFile file(path_);
      for (const auto& entry : file.tensors()) file.tensor(entry.name).clone();
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kInputOutput);
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr(path_.string()));
      return error.what_without_backtrace();
    }
    return "";
  }
  std::string verdict(const std::string& header, size_t data_bytes) {
    write(header, data_bytes);
    return verdict();
  }

  TemporaryFolder folder_;
  const fs::path path_ = folder_.path() / "model.safetensors";
};

TEST_F(SafetensorsTest, EveryDtypeComesBackWithItsBits) {
  std::map<std::string, at::Tensor> tensors;
  std::vector<TensorSpec> specs;
  for (const auto dtype :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
        at::kShort, at::kChar, at::kByte, at::kBool}) {
    const std::string name = "t." + dtype_name(dtype);
    tensors[name] = at::randint(0, 2, {3, 5}, at::kLong).to(dtype);
    specs.push_back({name, dtype, {3, 5}});
  }
  tensors["scalar"] = at::scalar_tensor(7.5);
  specs.push_back({"scalar", at::kFloat, {}});
  tensors["none"] = at::empty({0, 4});
  specs.push_back({"none", at::kFloat, {0, 4}});
  // Strides and odd names are the writer's business, not the caller's.
  tensors["../\"quoted\"\n"] = at::rand({6, 4}).t();
  specs.push_back({"../\"quoted\"\n", at::kFloat, {4, 6}});

  const Metadata metadata = {{"format", "pt"}, {"note", "a \"b\" \\ c"}};
  write_safetensors(path_, specs, metadata,
                    [&](const std::string& name) { return tensors.at(name); });

  SafetensorsFile file(path_);
  EXPECT_EQ(file.metadata(), metadata);
  EXPECT_EQ(file.header_bytes() % 8, 0);
  ASSERT_EQ(file.tensors().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor read = file.tensor(name);
    EXPECT_EQ(read.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(at::equal(read, tensor)) << name;
  }
  EXPECT_EQ(file.find("absent"), nullptr);
  EXPECT_THROW(file.tensor("absent"), Error);
}

TEST_F(SafetensorsTest, ViewsOutliveTheFileAndBoxesAreTheirParts) {
  const at::Tensor whole = at::rand({6, 5});
  write_safetensors(path_, {{"w", at::kFloat, {6, 5}}}, {},
                    [&](const std::string&) { return whole; });
  at::Tensor part;
  {
    SafetensorsFile file(path_);
    part = file.read_box("w", {{2, 1}, {3, 4}});
    EXPECT_THROW(file.read_box("w", {{4, 0}, {3, 5}}), Error);
    EXPECT_THROW(file.read_box("w", {{0}, {6}}), Error);
    EXPECT_THROW(file.read_box("w", {{-1, 0}, {2, 2}}), Error);
  }
  EXPECT_TRUE(at::equal(part, whole.narrow(0, 2, 3).narrow(1, 1, 4)));
}

TEST_F(SafetensorsTest, SumsAreThoseOfTheBytesOnDisk) {
  const int64_t count = kChecksumBlockBytes / 4 * 2 + 77;
  const at::Tensor big = at::rand({count});
  const at::Tensor small = at::arange(3, at::kByte);
  const FileSums sums = write_safetensors(
      path_, {{"small", at::kByte, {3}}, {"big", at::kFloat, {count}}}, {},
      [&](const std::string& name) { return name == "big" ? big : small; });

  const SafetensorsFile file(path_);
  const std::string_view bytes = file.bytes();
  EXPECT_EQ(sums.bytes, std::ssize(bytes));
  EXPECT_EQ(sums.header_crc32c,
            crc32c(bytes_of(bytes, 0, file.header_bytes())));
  ASSERT_EQ(sums.tensors.size(), 2u);
  EXPECT_EQ(sums.tensors[0].name, "big");  // wider dtypes first
  ASSERT_EQ(sums.tensors[0].blocks.size(), 3u);
  EXPECT_EQ(
      sums.tensors[0].blocks[2],
      crc32c(bytes_of(bytes, sums.tensors[0].begin + 2 * kChecksumBlockBytes,
                      77 * 4)));
  EXPECT_EQ(sums.hash, hash128(bytes));
}

TEST_F(SafetensorsTest, UnalignedDataOfOtherWritersIsRead) {
  write(R"({"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}} )", 16);
  EXPECT_EQ(SafetensorsFile(path_).header_bytes() % 8, 0);
  write(R"({"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}  )", 16);
  const SafetensorsFile file(path_);
  EXPECT_NE(file.header_bytes() % 8, 0);
  const at::Tensor read = file.tensor("a");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(read.const_data_ptr()) % 8, 0u);
  EXPECT_EQ(std::memcmp(read.const_data_ptr(), "xxxxxxxxxxxxxxxx", 16), 0);
}

TEST_F(SafetensorsTest, GoodHeadersAreTaken) {
  EXPECT_EQ(verdict("{}", 0), "");
  EXPECT_EQ(verdict(R"({"__metadata__":{}}   )", 0), "");
  EXPECT_EQ(
      verdict(R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})", 1),
      "");
  // The header's order need not be that of the bytes.
  EXPECT_EQ(verdict(R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},)"
                    R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                    R"("e":{"shape":[0],"data_offsets":[1,1],"dtype":"F32"}})",
                    3),
            "");
}

TEST_F(SafetensorsTest, HostileHeadersAreRefusedAndTheTensorNamed) {
  struct Case {
    std::string header;
    size_t data;
    std::string says;
  };
  const auto tensor = [](const std::string& fields) {
    return "{\"a\":{" + fields + "}}";
  };
  const std::string deep(100'000, '[');
  const std::vector<Case> cases = {
      {"", 0, "does not begin with '{'"},
      {" {}", 0, "does not begin with '{'"},
      {"\xEF\xBB\xBF{}", 0, "does not begin with '{'"},
      {"[]", 0, "does not begin with '{'"},
      {"{}\n", 0, "does not end with '}'"},
      {std::string("{}\0}", 4), 0, "zero byte"},
      {"{} {}", 0, "no JSON"},
      {"{\"a\":" + deep, 0, "does not end with"},
      {"{\"a\":" + deep + "}", 0, "a list is not what"},
      {"{\"a\":1}", 0, "tensor \"a\": 1 is not what"},
      {"{\"a\":null}", 0, "null is not what"},
      {"{\"a\xFF\":{}}", 0, "no JSON"},
      {"{\"a\":{}}", 0, "tensor \"a\": needs dtype, shape and data_offsets"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1)"), 4,
       "unknown field \"x\""},
      {tensor(
           R"("dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4])"),
       4, "dtype is there twice"},
      {R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
       R"("a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
       0, "tensor \"a\" twice"},
      {R"({"__metadata__":{"k":"1","k":"2"}})", 0, "\"k\" is there twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "__metadata__ twice"},
      {R"({"__metadata__":{"k":1}})", 0, "__metadata__: \"k\": 1 is not"},
      {R"({"__metadata__":null})", 0, "null is not"},
      {tensor(R"("dtype":"F33","shape":[1],"data_offsets":[0,4])"), 4,
       "dtype \"F33\""},
      {tensor(R"("dtype":7,"shape":[1],"data_offsets":[0,4])"), 4, "7 is not"},
      {tensor(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), 4,
       "tensor \"a\": \"shape\": -1 is not"},
      {tensor(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), 4,
       "1.0 is not"},
      {tensor(R"("dtype":"F32","shape":[1e0],"data_offsets":[0,4])"), 4,
       "1e0 is not"},
      {tensor(R"("dtype":"F32","shape":[[1]],"data_offsets":[0,4])"), 4,
       "a list is not"},
      {tensor(R"("dtype":"F32","shape":1,"data_offsets":[0,4])"), 4,
       "1 is not"},
      {tensor(R"("dtype":"F32","shape":[9223372036854775808],)"
              R"("data_offsets":[0,4])"),
       4, "too large"},
      {tensor(R"("dtype":"F32","shape":[18446744073709551617],)"
              R"("data_offsets":[0,4])"),
       4, "is not"},
      {tensor(R"("dtype":"F32","shape":[4294967296,4294967296,4],)"
              R"("data_offsets":[0,0])"),
       0, "overflows"},
      {tensor(R"("dtype":"F32","shape":[4611686018427387904],)"
              R"("data_offsets":[0,0])"),
       0, "overflows"},
      {tensor(R"("dtype":"F32","shape":[0,4294967296,4294967296],)"
              R"("data_offsets":[0,0])"),
       0, "overflows"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), 4,
       "run backwards"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0])"), 4,
       "has 1 numbers"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,4])"), 4,
       "more than 2"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), 4,
       "need 8 bytes"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"), 8,
       "(hole)"},
      {R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
       4, "tensor \"b\": begins at byte 2"},
      {tensor(R"("dtype":"U8","shape":[9223372036854775807],)"
              R"("data_offsets":[0,9223372036854775807])"),
       4, "truncated"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), 3,
       "tensor \"a\" ends at byte 4"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), 5,
       "the file has"},
  };
  for (const Case& bad : cases) {
    EXPECT_THAT(verdict(bad.header, bad.data), HasSubstr(bad.says))
        << bad.header.substr(0, 200);
  }
}

TEST_F(SafetensorsTest, AFileThatIsTooShortOrLiesAboutItsHeaderIsRefused) {
  EXPECT_THAT(verdict(), HasSubstr("cannot be opened"));
  std::ofstream(path_, std::ios::binary) << "1234567";
  EXPECT_THAT(verdict(), HasSubstr("has 7 bytes"));
  for (const uint64_t length :
       {uint64_t{3}, uint64_t{100'000'001}, ~uint64_t{0}, ~uint64_t{0} - 7}) {
    std::ofstream out(path_, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), 8);
    out << "{}";
    out.close();
    EXPECT_THAT(verdict(), HasSubstr("header says")) << length;
  }
  fs::remove(path_);
  fs::create_directory(path_);
  EXPECT_THAT(verdict(), HasSubstr("not a regular file"));
}

TEST_F(SafetensorsTest, TooManyTensorsAreRefusedBeforeTheyAreBuilt) {
  std::string header = "{";
  for (int64_t i = 0; i <= kMaxTensorsPerFile; ++i) {
    header += (i == 0 ? "\"" : ",\"") + std::to_string(i) +
              R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  }
  EXPECT_THAT(verdict(header + "}", 0), HasSubstr("more than 262144 tensors"));
}

TEST_F(SafetensorsTest, AFailedWriteLeavesNoFile) {
  const auto failing = [](const std::string&) -> at::Tensor {
    TS_CHECK(false, "no tensor today");
  };
  EXPECT_THROW(write_safetensors(path_, {{"a", at::kFloat, {1}}}, {}, failing),
               Error);
  EXPECT_FALSE(fs::exists(path_));
  EXPECT_THROW(
      write_safetensors(path_, {{"a", at::kFloat, {1}}, {"a", at::kFloat, {1}}},
                        {}, failing),
      Error);
  std::ofstream(path_) << "there already";
  EXPECT_THROW(write_safetensors(path_, {{"a", at::kFloat, {1}}}, {}, failing),
               Error);
  EXPECT_EQ(fs::file_size(path_), 13u);
}

}  // namespace
}  // namespace tessera::checkpoint
