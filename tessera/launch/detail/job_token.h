// The secret that the ranks of a job share, and what two of them make of it on
// one connection: proofs that each knows it, and seals of what they say.
//
// Source: HMAC-SHA256 (RFC 2104) over a label and both nonces; messages are
//         sealed by ChaCha20-Poly1305 (RFC 8439), with the number of the
//         message as the nonce: what is changed, repeated, left out or sent
//         back does not open. By libsodium.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::launch::detail {

using Bytes32 = std::array<uint8_t, 32>;

// What two sides have drawn for one connection.
struct Nonces {
  Bytes32 client{};
  Bytes32 server{};
};

Bytes32 draw_nonce();
// In a time that tells nothing of where they differ.
bool are_same(const Bytes32& one, const Bytes32& other);

// Of one direction of a connection: one end closes with it what the other end
// opens with its own of the same key, in the same order.
class Seal {
 public:
  static constexpr size_t kMore = 16;  // bytes than what is sealed

  explicit Seal(const Bytes32& key) : key_(key) {}
  std::string close(std::string_view message);
  // nullopt: it is not the next message of the other end.
  std::optional<std::string> open(std::string_view sealed);

 private:
  std::array<uint8_t, 12> next_nonce();

  Bytes32 key_;
  uint64_t messages_ = 0;
};

class JobToken {
 public:
  explicit JobToken(std::string_view secret);
  // Errors: 78 where the file is missing, is short (under 32 characters), is
  //         another user's or may be read by others.
  static JobToken of_file(const std::filesystem::path& path);

  enum class Side { kClient, kServer };
  // That this side knows the token.
  Bytes32 proof_of(Side side, const Nonces& nonces) const;
  // Of what this side says.
  Seal seal_of(Side side, const Nonces& nonces) const;

 private:
  Bytes32 code_of(std::string_view label, const Nonces& nonces) const;

  Bytes32 key_{};
};

}  // namespace tessera::launch::detail
