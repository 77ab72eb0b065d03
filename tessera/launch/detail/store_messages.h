// What a rank and the store of a job with a token say to each other.
//
// Greeting: the rank sends kHello and a nonce; the store its nonce and its
//           proof; the rank its proof (job_token.h); the store an answer, that
//           it has taken it in. Then requests and answers in turn, each in two
//           sealed pieces: how many bytes it has, in four, and the message, a
//           word (Request, Answer) and fields. A field is a number, or a number
//           of bytes and these; numbers have eight bytes, lowest first.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/launch/detail/job_token.h"

namespace tessera::launch::detail {

static_assert(std::endian::native == std::endian::little);

inline constexpr std::string_view kHello = "tessera1";
// Of a message. A flight record of 256 operations is 100 KB.
inline constexpr uint32_t kMostBytes = 64 << 20;
inline constexpr size_t kSealedLength = sizeof(uint32_t) + Seal::kMore;

enum class Request : uint8_t {
  kSet,         // key, value -> nothing
  kGet,         // milliseconds, key -> its value, when it has one
  kWait,        // milliseconds, keys... -> nothing, when all are there
  kCheck,       // keys... -> whether all are there
  kAdd,         // key, number -> the sum
  kCompareSet,  // key, expected, desired -> its value then
  kDelete,      // key -> whether it was there
  kCount,       // -> keys that are there
};

enum class Answer : uint8_t { kDone, kTimedOut };

class MessageWriter {
 public:
  explicit MessageWriter(Request word) : text_(1, static_cast<char>(word)) {}
  explicit MessageWriter(Answer word) : text_(1, static_cast<char>(word)) {}

  MessageWriter& add(int64_t number) {
    text_.append(reinterpret_cast<const char*>(&number), sizeof number);
    return *this;
  }
  MessageWriter& add(std::string_view bytes) {
    add(static_cast<int64_t>(bytes.size()));
    text_.append(bytes);
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Every field is nullopt from the first on that is not there.
class MessageReader {
 public:
  explicit MessageReader(std::string_view text) : rest_(text) {}

  std::optional<uint8_t> word() {
    const auto found = take(1);
    return found ? std::optional(static_cast<uint8_t>(found->front()))
                 : std::nullopt;
  }
  std::optional<int64_t> number() {
    int64_t number = 0;
    const auto found = take(sizeof number);
    if (!found) return std::nullopt;
    std::memcpy(&number, found->data(), sizeof number);
    return number;
  }
  std::optional<std::string> bytes() {
    const auto size = number();
    const auto found =
        size && *size >= 0 ? take(static_cast<uint64_t>(*size)) : std::nullopt;
    return found ? std::optional<std::string>(*found) : std::nullopt;
  }
  bool at_end() const { return !failed_ && rest_.empty(); }

 private:
  std::optional<std::string_view> take(uint64_t size) {
    failed_ = failed_ || size > rest_.size();
    if (failed_) return std::nullopt;
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  std::string_view rest_;
  bool failed_ = false;
};

// As it goes over the wire. REQUIRES: kMostBytes at the most.
inline std::string sealed_pieces(Seal& seal, std::string_view message) {
  const auto size = static_cast<uint32_t>(message.size());
  const std::string length = seal.close(
      std::string_view(reinterpret_cast<const char*>(&size), sizeof size));
  return length + seal.close(message);
}

// The bytes of the sealed message that follows; nullopt: that is no length.
inline std::optional<size_t> size_after(Seal& seal, std::string_view length) {
  uint32_t size = 0;
  const auto opened = seal.open(length);
  if (!opened || opened->size() != sizeof size) return std::nullopt;
  std::memcpy(&size, opened->data(), sizeof size);
  if (size > kMostBytes) return std::nullopt;
  return size + Seal::kMore;
}

}  // namespace tessera::launch::detail
