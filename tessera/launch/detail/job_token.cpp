#include "tessera/launch/detail/job_token.h"

#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstring>

#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::launch::detail {
namespace {

constexpr size_t kFewestCharacters = 32;

const uint8_t* bytes_of(std::string_view text) {
  return reinterpret_cast<const uint8_t*>(text.data());
}

uint8_t* bytes_of(std::string& text) {
  return reinterpret_cast<uint8_t*>(text.data());
}

void start_sodium() {
  static const int started = sodium_init();
  TORCH_INTERNAL_ASSERT(started >= 0);
}

}  // namespace

Bytes32 draw_nonce() {
  start_sodium();
  Bytes32 nonce;
  randombytes_buf(nonce.data(), nonce.size());
  return nonce;
}

bool are_same(const Bytes32& one, const Bytes32& other) {
  return sodium_memcmp(one.data(), other.data(), one.size()) == 0;
}

std::array<uint8_t, 12> Seal::next_nonce() {
  std::array<uint8_t, crypto_aead_chacha20poly1305_ietf_NPUBBYTES> nonce{};
  std::memcpy(nonce.data(), &messages_, sizeof messages_);
  ++messages_;
  return nonce;
}

std::string Seal::close(std::string_view message) {
  const auto nonce = next_nonce();
  static_assert(kMore == crypto_aead_chacha20poly1305_ietf_ABYTES);
  std::string sealed(message.size() + kMore, '\0');
  crypto_aead_chacha20poly1305_ietf_encrypt(
      bytes_of(sealed), nullptr, bytes_of(message), message.size(), nullptr, 0,
      nullptr, nonce.data(), key_.data());
  return sealed;
}

std::optional<std::string> Seal::open(std::string_view sealed) {
  if (sealed.size() < kMore) return std::nullopt;
  const auto nonce = next_nonce();
  std::string message(sealed.size() - kMore, '\0');
  const int opened = crypto_aead_chacha20poly1305_ietf_decrypt(
      bytes_of(message), nullptr, nullptr, bytes_of(sealed), sealed.size(),
      nullptr, 0, nonce.data(), key_.data());
  return opened == 0 ? std::optional(std::move(message)) : std::nullopt;
}

JobToken::JobToken(std::string_view secret) {
  start_sodium();
  crypto_hash_sha256(key_.data(), bytes_of(secret), secret.size());
}

JobToken JobToken::of_file(const std::filesystem::path& path) {
  struct stat found{};
  TS_CHECK_CONFIG(stat(path.c_str(), &found) == 0,
                  "TESSERA_TOKEN_FILE=", path.string(), ": ",
                  std::strerror(errno),
                  ". Every host needs the job's token there: `(umask 077; head "
                  "-c 32 /dev/urandom | base64 > FILE)` makes one.");
  TS_CHECK_CONFIG(found.st_uid == geteuid() || found.st_uid == 0,
                  "TESSERA_TOKEN_FILE=", path.string(),
                  " is another user's, who can read and change it. Have one of "
                  "your own.");
  TS_CHECK_CONFIG((found.st_mode & (S_IRWXG | S_IRWXO)) == 0,
                  "TESSERA_TOKEN_FILE=", path.string(),
                  " is open to other users than its owner: make a new token, "
                  "and keep its file to yourself (chmod 600).");
  std::string secret;
  try {
    secret = read_file(path, /*max_bytes=*/4096);
  } catch (const Error& error) {
    TS_CHECK_CONFIG(false, "TESSERA_TOKEN_FILE: ", message_of(error));
  }
  while (!secret.empty() && std::isspace(static_cast<uint8_t>(secret.back()))) {
    secret.pop_back();
  }
  TS_CHECK_CONFIG(
      secret.size() >= kFewestCharacters, "TESSERA_TOKEN_FILE=", path.string(),
      " holds ", secret.size(),
      " characters; a token that cannot be guessed has ", kFewestCharacters,
      " or more (`head -c 32 /dev/urandom | base64`).");
  JobToken token(secret);
  sodium_memzero(secret.data(), secret.size());
  return token;
}

Bytes32 JobToken::code_of(std::string_view label, const Nonces& nonces) const {
  std::string text(label);
  for (const Bytes32& nonce : {nonces.client, nonces.server}) {
    text.append(nonce.begin(), nonce.end());
  }
  Bytes32 code;
  crypto_auth_hmacsha256(code.data(), bytes_of(text), text.size(), key_.data());
  return code;
}

Bytes32 JobToken::proof_of(Side side, const Nonces& nonces) const {
  return code_of(side == Side::kClient ? "tessera: I am a rank; "
                                       : "tessera: I am the store; ",
                 nonces);
}

Seal JobToken::seal_of(Side side, const Nonces& nonces) const {
  return Seal(code_of(side == Side::kClient ? "tessera: to the store; "
                                            : "tessera: to a rank; ",
                      nonces));
}

}  // namespace tessera::launch::detail
