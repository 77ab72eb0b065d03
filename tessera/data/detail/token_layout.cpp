#include "tessera/data/detail/token_layout.h"

#include <algorithm>
#include <cstring>

#include "tessera/core/error.h"

namespace tessera::data::detail {
namespace {

// Entry i of an array of T that need not be aligned.
template <typename T>
T load(const std::byte* data, int64_t i = 0) {
  T value;
  std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

constexpr int64_t kLlmcHeaderBytes = 1024;
constexpr int32_t kLlmcMagic16 = 20240520;
constexpr int32_t kLlmcMagic32 = 20240801;
constexpr int32_t kLlmcVersion16 = 1;
constexpr int32_t kLlmcVersion32 = 7;

constexpr char kMegatronMagic[] = "MMIDIDX\0";  // with the 0 at the end: 9
constexpr int64_t kMegatronMagicBytes = 9;
// Magic, version (u64), type (u8), sequences (u64), documents (u64).
constexpr int64_t kMegatronHeaderBytes = kMegatronMagicBytes + 8 + 1 + 8 + 8;

constexpr char kCacheMagic[] = "TSTOKENS";
constexpr uint64_t kCacheVersion = 1;

struct CacheHeader {
  char magic[8] = {'T', 'S', 'T', 'O', 'K', 'E', 'N', 'S'};
  uint64_t version = kCacheVersion;
  Hash128 key;
  uint64_t width = 0;
  uint64_t count = 0;
  uint64_t xxh3 = 0;
  uint64_t reserved = 0;

  bool has_right_form() const {
    return std::memcmp(magic, kCacheMagic, sizeof(magic)) == 0 &&
           version == kCacheVersion && (width == 2 || width == 4);
  }
};
static_assert(sizeof(CacheHeader) == kCacheHeaderBytes);

IdType megatron_type(uint8_t code, const std::string& path) {
  switch (code) {
    case 1:
      return IdType::kU8;
    case 3:
      return IdType::kI16;
    case 4:
      return IdType::kI32;
    case 5:
      return IdType::kI64;
    case 8:
      return IdType::kU16;
    default:
      break;
  }
  TS_CHECK_IO(false, path, ": byte 17: the type code ", int{code},
              " is not one of ids: 1 uint8, 3 int16, 4 int32, 5 int64, "
              "8 uint16.");
}

// An .idx: sizes, places in the .bin and the documents' first sequences.
struct MegatronIndex {
  explicit MegatronIndex(const MappedFile& file) : path(file.path()) {
    TS_CHECK_IO(
        has_megatron_header(file), path,
        ": is no Megatron index: it does not begin with MMIDIDX, or has "
        "fewer than ",
        kMegatronHeaderBytes, " bytes.");
    const std::byte* data = file.bytes().data();
    const auto version = load<uint64_t>(data + 9, 0);
    TS_CHECK_IO(version == 1, path, ": byte 9: version ", version,
                " is not known; 1 is.");
    type = megatron_type(load<uint8_t>(data + 17, 0), path);
    const auto sequences = load<uint64_t>(data + 18, 0);
    const auto documents = load<uint64_t>(data + 26, 0);
    // 12 bytes a sequence and 8 a document; the bound keeps the sum in range.
    const uint64_t rest = file.size() - kMegatronHeaderBytes;
    TS_CHECK_IO(sequences <= rest / 12 && documents <= rest / 8 &&
                    12 * sequences + 8 * documents == rest,
                path, ": ", sequences, " sequences and ", documents,
                " documents take ", kMegatronHeaderBytes,
                " + 12 x sequences + 8 x documents bytes; the file has ",
                file.size(), ".");
    num_sequences = static_cast<int64_t>(sequences);
    num_documents = static_cast<int64_t>(documents);
    sizes = data + kMegatronHeaderBytes;
    places = sizes + 4 * num_sequences;
    document_starts = places + 8 * num_sequences;
  }

  // How many ids, which lie in the .bin in order and without gaps.
  int64_t count_ids(uint64_t bin_bytes) const {
    const int64_t width = width_of(type);
    int64_t count = 0;
    for (int64_t i = 0; i < num_sequences; ++i) {
      const auto size = load<int32_t>(sizes, i);
      const auto place = load<int64_t>(places, i);
      TS_CHECK_IO(size >= 0, path, ": sequence ", i, " has the size ", size,
                  ".");
      TS_CHECK_IO(place == count * width, path, ": sequence ", i,
                  " lies at byte ", place, " of the .bin and not at ",
                  count * width,
                  ", where the one before it ends. Files with "
                  "gaps or in another order are not supported.");
      count += size;
      TS_CHECK_IO(static_cast<uint64_t>(count) <= bin_bytes / width, path,
                  ": sequence ", i, " ends at token ", count,
                  ", behind the end of the .bin, which has ", bin_bytes,
                  " bytes.");
    }
    TS_CHECK_IO(static_cast<uint64_t>(count * width) == bin_bytes, path,
                ": its ", num_sequences, " sequences take ", count * width,
                " bytes of the .bin, which has ", bin_bytes, ".");
    return count;
  }

  void check_documents() const {
    int64_t previous = 0;
    for (int64_t i = 0; i < num_documents; ++i) {
      const auto start = load<int64_t>(document_starts, i);
      TS_CHECK_IO(start >= previous && start <= num_sequences, path,
                  ": document ", i, " begins at sequence ", start,
                  "; expected one from ", previous, " to ", num_sequences, ".");
      previous = start;
    }
  }

  std::string path;
  IdType type = IdType::kU16;
  int64_t num_sequences = 0;
  int64_t num_documents = 0;  // places where documents begin, and the end
  const std::byte* sizes = nullptr;
  const std::byte* places = nullptr;
  const std::byte* document_starts = nullptr;
};

}  // namespace

TokenLayout raw_layout(const MappedFile& file, IdType type) {
  const int64_t width = width_of(type);
  const auto size = static_cast<int64_t>(file.size());
  TS_CHECK_IO(size % width == 0, file.path(), ": ", size,
              " bytes are not a whole number of ids of ", width,
              " bytes: the file is cut off, or of another format.");
  return {{file.bytes().data(), type, size / width}};
}

bool has_llmc_header(const MappedFile& file) {
  if (file.size() < kLlmcHeaderBytes) return false;
  const auto magic = load<int32_t>(file.bytes().data());
  return magic == kLlmcMagic16 || magic == kLlmcMagic32;
}

TokenLayout llmc_layout(const MappedFile& file) {
  TS_CHECK_IO(has_llmc_header(file), file.path(),
              ": does not begin with "
              "llm.c's header of ",
              kLlmcHeaderBytes, " bytes (magic ", kLlmcMagic16, " or ",
              kLlmcMagic32, ").");
  const std::byte* data = file.bytes().data();
  const bool narrow = load<int32_t>(data, 0) == kLlmcMagic16;
  const int32_t known = narrow ? kLlmcVersion16 : kLlmcVersion32;
  const auto version = load<int32_t>(data, 1);
  TS_CHECK_IO(version == known, file.path(), ": byte 4: version ", version,
              " of llm.c's format is not known; ", known, " is.");
  const int64_t count = load<int32_t>(data, 2);
  const IdType type = narrow ? IdType::kU16 : IdType::kU32;
  const int64_t expected = kLlmcHeaderBytes + count * width_of(type);
  TS_CHECK_IO(count >= 0 && expected == static_cast<int64_t>(file.size()),
              file.path(), ": byte 8: the header says ", count,
              " ids, which with it take ", expected, " bytes; the file has ",
              file.size(), ".");
  return {{data + kLlmcHeaderBytes, type, count}};
}

bool has_megatron_header(const MappedFile& index) {
  return index.size() >= kMegatronHeaderBytes &&
         std::memcmp(index.bytes().data(), kMegatronMagic,
                     kMegatronMagicBytes) == 0;
}

TokenLayout megatron_layout(const MappedFile& bin, const MappedFile& index) {
  const MegatronIndex parts(index);
  const int64_t count = parts.count_ids(bin.size());
  parts.check_documents();
  return {{bin.bytes().data(), parts.type, count},
          std::max<int64_t>(parts.num_documents - 1, 0)};
}

TokenLayout cache_layout(const MappedFile& file) {
  CacheHeader header;
  TS_CHECK_IO(file.size() >= sizeof(header), file.path(),
              ": is too short for a token cache.");
  std::memcpy(&header, file.bytes().data(), sizeof(header));
  TS_CHECK_IO(header.has_right_form() &&
                  header.count == (file.size() - sizeof(header)) / header.width,
              file.path(),
              ": is no token cache of this version, or is cut "
              "off. Remove it to have it made again.");
  return {{file.bytes().data() + sizeof(header),
           header.width == 2 ? IdType::kU16 : IdType::kU32,
           static_cast<int64_t>(header.count)}};
}

bool has_cache_header(const MappedFile& file) {
  return file.size() >= kCacheHeaderBytes &&
         std::memcmp(file.bytes().data(), kCacheMagic, 8) == 0;
}

std::string cache_header(const Hash128& key, IdType type, int64_t count,
                         uint64_t xxh3) {
  CacheHeader header;
  header.key = key;
  header.width = static_cast<uint64_t>(width_of(type));
  header.count = static_cast<uint64_t>(count);
  header.xxh3 = xxh3;
  std::string bytes(sizeof(header), '\0');
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

bool is_cache_of(const MappedFile& file, const Hash128& key) {
  CacheHeader header;
  if (file.size() < sizeof(header)) return false;
  std::memcpy(&header, file.bytes().data(), sizeof(header));
  const uint64_t rest = file.size() - sizeof(header);
  return header.has_right_form() && header.key == key &&
         rest % header.width == 0 && header.count == rest / header.width &&
         header.xxh3 == hash64(file.bytes().subspan(sizeof(header)));
}

}  // namespace tessera::data::detail
