#include "tessera/data/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()),
          values.size() * sizeof(T)};
}

template <typename T>
void put(std::string& bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof(T));
}

std::string llmc_bytes(const std::vector<uint16_t>& ids) {
  std::vector<int32_t> header(256);
  header[0] = 20240520;
  header[1] = 1;
  header[2] = static_cast<int32_t>(ids.size());
  return bytes_of(header) + bytes_of(ids);
}

// An index of sequences of the given sizes, one a document.
std::string megatron_index(uint8_t type, int64_t width,
                           const std::vector<int32_t>& sizes) {
  std::string bytes("MMIDIDX\0\0", 9);
  bytes += bytes_of<uint64_t>({1}) + static_cast<char>(type);
  bytes += bytes_of<uint64_t>({sizes.size(), sizes.size() + 1});
  bytes += bytes_of(sizes);
  std::vector<int64_t> places, documents = {0};
  int64_t place = 0;
  for (const int32_t size : sizes) {
    places.push_back(place);
    place += size * width;
    documents.push_back(static_cast<int64_t>(places.size()));
  }
  return bytes + bytes_of(places) + bytes_of(documents);
}

std::vector<int64_t> all_of(const TokenFile& file) {
  std::vector<int64_t> ids(file.size());
  file.read(0, ids);
  return ids;
}

class TokenFileTest : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& bytes) {
    // Not synced to the disk, as write_file_atomic() does: there are many.
    std::ofstream(folder_.file(name), std::ios::binary) << bytes;
    return folder_.file(name);
  }

  // What opening says; "opened" when it does not complain.
  static std::string complaint(const std::string& path,
                               const std::string& format = "auto",
                               int64_t vocab_size = 1000) {
    try {
      const TokenFile file(path, format, vocab_size);
      file.check_ids();
    } catch (const Error& error) {
      return error.what_without_backtrace();
    }
    return "opened";
  }

  TemporaryFolder folder_;
};

TEST_F(TokenFileTest, ReadsIdsOfBothWidths) {
  const TokenFile narrow(write("a.bin", bytes_of<uint16_t>({3, 1, 999, 0})),
                         "auto", 1000);
  EXPECT_EQ(narrow.format(), "tokens_u16");
  EXPECT_EQ(all_of(narrow), (std::vector<int64_t>{3, 1, 999, 0}));
  const TokenFile wide(write("b.u32", bytes_of<uint32_t>({70000, 5})), "auto",
                       100'000);
  EXPECT_EQ(wide.format(), "tokens_u32");
  std::vector<int64_t> last(1);
  wide.read(1, last);
  EXPECT_EQ(last[0], 5);
}

TEST_F(TokenFileTest, ReadsLlmc) {
  const TokenFile narrow(write("a.bin", llmc_bytes({7, 8, 9})), "auto", 10);
  EXPECT_EQ(narrow.format(), "llmc");
  EXPECT_EQ(all_of(narrow), (std::vector<int64_t>{7, 8, 9}));
  std::vector<int32_t> header(256);
  header[0] = 20240801;
  header[1] = 7;
  header[2] = 2;
  const TokenFile wide(
      write("b.bin", bytes_of(header) + bytes_of<uint32_t>({128000, 4})),
      "auto", 128256);
  EXPECT_EQ(all_of(wide), (std::vector<int64_t>{128000, 4}));
}

TEST_F(TokenFileTest, ReadsMegatronsTypes) {
  const std::vector<int64_t> ids = {1, 2, 3, 100, 5};
  const auto check = [&]<typename T>(uint8_t code, T) {
    const std::string bin =
        write("m.bin", bytes_of(std::vector<T>(ids.begin(), ids.end())));
    const std::string index =
        write("m.idx", megatron_index(code, sizeof(T), {2, 0, 3}));
    for (const std::string& path : {bin, index, folder_.file("m")}) {
      const TokenFile file(path, "auto", 101);
      EXPECT_EQ(file.format(), "megatron");
      EXPECT_EQ(file.num_documents(), 3);
      EXPECT_EQ(all_of(file), ids);
      EXPECT_EQ(file.fingerprints().size(), 2u);
    }
    EXPECT_THAT(complaint(bin, "auto", 100), HasSubstr("is 100, which is"));
  };
  check(1, uint8_t{});
  check(3, int16_t{});
  check(4, int32_t{});
  check(5, int64_t{});
  check(8, uint16_t{});
}

TEST_F(TokenFileTest, AnIdOutsideTheVocabularyIsNamedWithItsPlace) {
  std::vector<uint16_t> ids(100'000, 7);
  ids[77'777] = 50257;
  const std::string raw = write("a.bin", bytes_of(ids));
  EXPECT_THAT(complaint(raw, "auto", 50257),
              AllOf(HasSubstr(raw + ": token 77777 (byte 155554) is 50257"),
                    HasSubstr("vocabulary of 50257 ids, 0 to 50256")));
  EXPECT_EQ(complaint(raw, "auto", 50258), "opened");
  EXPECT_THAT(complaint(write("b.bin", llmc_bytes({1, 2, 2000}))),
              HasSubstr("token 2 (byte 1028) is 2000"));
  write("m.bin", bytes_of<int32_t>({4, -5}));
  EXPECT_THAT(complaint(write("m.idx", megatron_index(4, 4, {2}))),
              HasSubstr("token 1 (byte 4) is -5"));
  write("n.bin", bytes_of<int16_t>({4, -5}));
  EXPECT_THAT(
      complaint(write("n.idx", megatron_index(3, 2, {2})), "auto", 100'000),
      HasSubstr("token 1 (byte 2) is -5"));
}

TEST_F(TokenFileTest, FilesThatChangeLaterAreRefused) {
  const std::string path = write("a.bin", bytes_of<uint16_t>({1, 2, 3}));
  const TokenFile file(path, "auto", 10);
  // In place: the mapping sees it.
  FILE* out = std::fopen(path.c_str(), "r+");
  ASSERT_EQ(std::fwrite("\xff\xff", 1, 2, out), 2u);
  std::fclose(out);
  std::vector<int64_t> ids(2);
  EXPECT_THROW(file.read(0, ids), Error);
  EXPECT_NO_THROW(file.read(1, ids));
}

TEST_F(TokenFileTest, OneThatIsEmptyIsRefusedAlikeWhateverItsFormat) {
  const std::string empty = write("empty.bin", "");
  write("pair.bin", "");
  write("pair.idx", "");
  for (const auto& [path, format] : {std::pair{empty, "auto"},
                                     {empty, "tokens_u16"},
                                     {empty, "tokens_u32"},
                                     {empty, "llmc"},
                                     {folder_.file("pair"), "megatron"}}) {
    try {
      const TokenFile file(path, format, 100);
      ADD_FAILURE() << format;
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig) << format;
      EXPECT_THAT(error.what(), HasSubstr(".bin: has no tokens: it is empty."));
    }
  }
}

TEST_F(TokenFileTest, SizesThatDoNotFitAreRefused) {
  EXPECT_THAT(complaint(write("odd.bin", "abc")),
              HasSubstr("3 bytes are not a whole number of ids of 2 bytes"));
  EXPECT_THAT(complaint(write("empty.bin", "")), HasSubstr("has no tokens"));
  EXPECT_THAT(complaint(write("x.u32", "abcdef")), HasSubstr("of 4 bytes"));
  const std::string good = llmc_bytes({1, 2, 3});
  EXPECT_THAT(complaint(write("cut.bin", good.substr(0, good.size() - 1))),
              HasSubstr("the header says 3 ids, which with it take 1030 bytes; "
                        "the file has 1029"));
  EXPECT_THAT(complaint(folder_.file("none.bin")), HasSubstr("none.bin"));
  EXPECT_THAT(complaint(folder_.path().string(), "tokens_u16"),
              HasSubstr(folder_.path().string()));
}

TEST_F(TokenFileTest, HeadersThatLieAreRefused) {
  std::string bytes = llmc_bytes({1, 2, 3});
  for (const int32_t count : {-1, 2, 4, INT32_MAX, INT32_MIN}) {
    put(bytes, 8, count);
    EXPECT_THAT(complaint(write("a.bin", bytes)), HasSubstr("header says"));
  }
  put(bytes, 4, 2);
  EXPECT_THAT(complaint(write("a.bin", bytes)), HasSubstr("version 2"));
  EXPECT_THAT(complaint(write("b.bin", bytes_of<uint16_t>({1})), "llmc"),
              HasSubstr("does not begin with llm.c's header"));
}

TEST_F(TokenFileTest, IndexesThatLieAreRefused) {
  write("m.bin", bytes_of<uint16_t>({1, 2, 3, 4, 5}));
  const std::string good = megatron_index(8, 2, {2, 3});
  const auto with = [&](size_t at, auto value) {
    std::string bytes = good;
    put(bytes, at, value);
    return complaint(write("m.idx", bytes), "megatron");
  };
  ASSERT_EQ(with(9, uint64_t{1}), "opened");
  EXPECT_THAT(with(0, 'X'), HasSubstr("does not begin with MMIDIDX"));
  EXPECT_THAT(with(9, uint64_t{2}), HasSubstr("version 2"));
  EXPECT_THAT(with(17, uint8_t{7}), HasSubstr("type code 7"));
  for (const uint64_t count :
       {uint64_t{0}, uint64_t{1}, uint64_t{3}, uint64_t{1} << 32,
        uint64_t{1} << 61, UINT64_MAX, UINT64_MAX / 12}) {
    EXPECT_THAT(with(18, count), HasSubstr("the file has"));
    if (count == 3) continue;  // the true number of documents
    EXPECT_THAT(with(26, count), HasSubstr("the file has"));
  }
  EXPECT_THAT(with(34, int32_t{-2}), HasSubstr("sequence 0 has the size -2"));
  EXPECT_THAT(with(38, int32_t{4}), HasSubstr("behind the end of the .bin"));
  EXPECT_THAT(with(38, INT32_MAX), HasSubstr("behind the end of the .bin"));
  EXPECT_THAT(with(38, int32_t{2}), HasSubstr("take 8 bytes of the .bin"));
  EXPECT_THAT(with(42, int64_t{2}), HasSubstr("sequence 0 lies at byte 2"));
  EXPECT_THAT(with(50, INT64_MIN), HasSubstr("sequence 1 lies at byte -"));
  EXPECT_THAT(with(66, int64_t{3}), HasSubstr("document 1 begins at"));
  EXPECT_THAT(with(66, int64_t{-1}), HasSubstr("document 1 begins at"));
}

// Whatever is cut off or flipped, opening refuses, or all that it gives can be
// read and is in the vocabulary.
TEST_F(TokenFileTest, DamagedFilesNeverCrash) {
  const std::vector<uint16_t> ids = {1, 2, 3, 4, 5};
  const std::string llmc = llmc_bytes(ids);
  const std::string index = megatron_index(8, 2, {2, 3});
  write("m.bin", bytes_of(ids));
  const auto try_open = [&](const std::string& path, const char* format) {
    try {
      const TokenFile file(path, format, 10);
      for (const int64_t id : all_of(file)) ASSERT_LT(id, 10);
    } catch (const Error& error) {
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr("/"));
    }
  };
  for (size_t size = 0; size <= llmc.size(); size += 3) {
    try_open(write("a.bin", llmc.substr(0, size)), "auto");
  }
  for (size_t size = 0; size <= index.size(); ++size) {
    try_open(write("m.idx", index.substr(0, size)), "megatron");
  }
  for (size_t bit = 0; bit < 8 * index.size(); ++bit) {
    std::string bytes = index;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    try_open(write("m.idx", bytes), "megatron");
  }
  for (size_t bit = 0; bit < 8 * 16; ++bit) {
    std::string bytes = llmc;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    try_open(write("a.bin", bytes), "llmc");
  }
}

TEST_F(TokenFileTest, AWrongFormatIsNoticedWhereItCanBe) {
  const std::string wide = write("a.bin", bytes_of<uint32_t>({5, 6, 7}));
  EXPECT_THAT(complaint(wide), HasSubstr("Set data.format to tokens_u32"));
  EXPECT_EQ(complaint(wide, "tokens_u16"), "opened");
  EXPECT_EQ(complaint(wide, "tokens_u32"), "opened");
  EXPECT_EQ(complaint(write("b.bin", bytes_of<uint16_t>({0, 0}))), "opened");
  EXPECT_THAT(complaint(write("c.bin", llmc_bytes({1})), "tokens_u16"),
              HasSubstr("has llm.c's header"));
  EXPECT_THAT(complaint(wide, "parquet"),
              HasSubstr("parquet is no format of token files"));
}

TEST_F(TokenFileTest, FormatsAreToldByNameAndContent) {
  EXPECT_EQ(detect_format(write("a.txt", "text")), "text");
  EXPECT_EQ(detect_format(write("README", "text")), "text");
  EXPECT_EQ(detect_format(write("a.bin", "ab")), "tokens_u16");
  EXPECT_EQ(detect_format(write("odd.name", llmc_bytes({1}))), "llmc");
  write("m.bin", "ab");
  write("m.idx", megatron_index(8, 2, {1}));
  EXPECT_EQ(detect_format(folder_.file("m.bin")), "megatron");
  write("n.bin", "ab");
  write("n.idx", "not an index");
  EXPECT_EQ(detect_format(folder_.file("n.bin")), "tokens_u16");
}

}  // namespace
}  // namespace tessera::data
