#include "tessera/data/detail/byte_reader.h"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "tessera/core/error.h"

namespace tessera::data::detail {
namespace {

constexpr std::string_view kGzip = "\x1f\x8b";
constexpr std::string_view kZstd = "\x28\xb5\x2f\xfd";

bool begins_with(std::span<const std::byte> bytes, std::string_view magic) {
  return bytes.size() >= magic.size() &&
         std::memcmp(bytes.data(), magic.data(), magic.size()) == 0;
}

// Of a frame, or of one that is skipped, which may be first.
bool is_zstd(std::span<const std::byte> bytes) {
  return begins_with(bytes, kZstd) ||
         (bytes.size() >= 4 &&
          (bytes[0] & std::byte{0xf0}) == std::byte{0x50} &&
          begins_with(bytes.subspan(1), "\x2a\x4d\x18"));
}

class PlainReader final : public ByteReader {
 public:
  explicit PlainReader(const MappedFile& file) : file_(file) {}

  size_t read(std::span<char> out) override {
    const auto rest = file_.bytes().subspan(at_);
    const size_t size = std::min(out.size(), rest.size());
    if (size > 0) std::memcpy(out.data(), rest.data(), size);
    at_ += size;
    return size;
  }
  uint64_t consumed() const override { return at_; }

 private:
  const MappedFile& file_;
  size_t at_ = 0;
};

// Members one behind another, as `cat a.gz b.gz` makes them, are one text.
class GzipReader final : public ByteReader {
 public:
  explicit GzipReader(const MappedFile& file) : file_(file) {
    constexpr int kGzipAlone = 16;  // asks zlib for gzip's header and sums
    TS_CHECK(inflateInit2(&stream_, MAX_WBITS + kGzipAlone) == Z_OK,
             file.path(), ": zlib could not start.");
  }
  ~GzipReader() override { inflateEnd(&stream_); }
  GzipReader(const GzipReader&) = delete;
  GzipReader& operator=(const GzipReader&) = delete;

  size_t read(std::span<char> out) override {
    constexpr size_t kMost = size_t{1} << 30;  // zlib counts in 32 bits
    size_t filled = 0;
    while (filled < out.size() && !at_end()) {
      const auto rest = file_.bytes().subspan(at_);
      const size_t give = std::min(rest.size(), kMost);
      const size_t room = std::min(out.size() - filled, kMost);
      // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): zlib only reads.
      auto* const input = const_cast<std::byte*>(rest.data());
      stream_.next_in = reinterpret_cast<Bytef*>(input);
      stream_.avail_in = static_cast<uInt>(give);
      stream_.next_out = reinterpret_cast<Bytef*>(out.data() + filled);
      stream_.avail_out = static_cast<uInt>(room);
      const int result = inflate(&stream_, Z_NO_FLUSH);
      at_ += give - stream_.avail_in;
      filled += room - stream_.avail_out;
      member_ended_ = result == Z_STREAM_END;
      TS_CHECK_IO(result == Z_OK || member_ended_, file_.path(),
                  ": is gzip, but ",
                  at_ == file_.size() ? "is cut off" : "is damaged",
                  " at byte ", at_, " of ", file_.size(), ".");
    }
    return filled;
  }
  uint64_t consumed() const override { return at_; }

 private:
  // Behind a member comes another one, or the end; zeros may fill a block.
  bool at_end() {
    if (!member_ended_) return false;
    const auto rest = file_.bytes().subspan(at_);
    if (begins_with(rest, kGzip)) {
      member_ended_ = false;
      inflateReset(&stream_);
      return false;
    }
    const bool padding = std::ranges::all_of(
        rest, [](std::byte byte) { return byte == std::byte{0}; });
    TS_CHECK_IO(padding, file_.path(), ": is gzip up to byte ", at_, " of ",
                file_.size(), ", and what follows is not.");
    return true;
  }

  const MappedFile& file_;
  z_stream stream_ = {};
  size_t at_ = 0;
  bool member_ended_ = false;
};

class ZstdReader final : public ByteReader {
 public:
  explicit ZstdReader(const MappedFile& file)
      : file_(file), stream_(ZSTD_createDStream(), ZSTD_freeDStream) {
    TS_CHECK(stream_ != nullptr, file.path(), ": Zstandard could not start.");
    // As `zstd --long=31` writes them.
    constexpr int kLargestWindow = 31;
    ZSTD_DCtx_setParameter(stream_.get(), ZSTD_d_windowLogMax, kLargestWindow);
  }

  size_t read(std::span<char> out) override {
    ZSTD_outBuffer to = {out.data(), out.size(), 0};
    ZSTD_inBuffer from = {file_.bytes().data(), file_.size(), at_};
    while (to.pos < to.size && (from.pos < from.size || !frame_ended_)) {
      const size_t before = from.pos + to.pos;
      const size_t result = ZSTD_decompressStream(stream_.get(), &to, &from);
      TS_CHECK_IO(ZSTD_isError(result) == 0U, file_.path(),
                  ": is Zstandard, but is damaged near byte ", from.pos, " of ",
                  file_.size(), ": ", ZSTD_getErrorName(result), ".");
      frame_ended_ = result == 0;
      TS_CHECK_IO(frame_ended_ || from.pos + to.pos > before, file_.path(),
                  ": is Zstandard, but is cut off at byte ", file_.size(), ".");
    }
    at_ = from.pos;
    return to.pos;
  }
  uint64_t consumed() const override { return at_; }

 private:
  const MappedFile& file_;
  std::unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> stream_;
  size_t at_ = 0;
  bool frame_ended_ = false;
};

}  // namespace

bool is_compressed(const MappedFile& file) {
  return begins_with(file.bytes(), kGzip) || is_zstd(file.bytes());
}

std::unique_ptr<ByteReader> open_bytes(const MappedFile& file) {
  if (begins_with(file.bytes(), kGzip)) {
    return std::make_unique<GzipReader>(file);
  }
  if (is_zstd(file.bytes())) {
    return std::make_unique<ZstdReader>(file);
  }
  return std::make_unique<PlainReader>(file);
}

}  // namespace tessera::data::detail
