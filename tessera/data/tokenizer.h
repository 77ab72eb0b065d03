// Byte-level BPE tokenizer: text to ids and back, as Hugging Face's tokenizers
// do it, from and to their tokenizer.json.
//
// Text:    UTF-8. Encoding refuses bytes that are not UTF-8 and names the first
//          of them, as reading the file into a Python str would; decoding shows
//          U+FFFD where a sequence of tokens is not UTF-8.
// Added tokens ("<|endoftext|>") are found in the text and become their ids.
// Threads: any number may use a tokenizer at once.
// Errors:  TS_CHECK_IO: a tokenizer.json that is missing, broken, or has a
//          piece that is not supported, by name; text that is not UTF-8.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/tokenizer_spec.h"

namespace tessera::data {

// What may end a text, for messages.
inline constexpr const char* kEndsOfText =
    "<|endoftext|>, <|end_of_text|>, </s>, or eos_token of "
    "tokenizer_config.json";

class Tokenizer {
 public:
  explicit Tokenizer(TokenizerSpec spec, const std::string& source = "spec");
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // `path`: a tokenizer.json, or a folder that has one.
  static Tokenizer load(const std::string& path);
  // To a file named *.json; else to a folder, made where it is missing: its
  // tokenizer.json, and the tokenizer_config.json that transformers asks for.
  void save(const std::string& path) const;

  // The largest id plus one: what a model's vocabulary must hold.
  int64_t vocab_size() const;
  std::optional<int64_t> id_of(const std::string& added_token) const;
  // The token that ends a document, of kEndsOfText the first, where there is
  // one.
  std::optional<int64_t> end_of_text() const;
  // What decides the ids of texts: to_json(), and the end of a text that only
  // tokenizer_config.json names.
  std::string identity() const;

  // `special_tokens`: with what the tokenizer puts around a text, if anything.
  std::vector<int64_t> encode(std::string_view text,
                              bool special_tokens = false) const;
  // The same ids of each text, by several threads, for much text.
  // /* threads = 0: all cores */
  std::vector<std::vector<uint32_t>> encode_texts(
      const std::vector<std::string_view>& texts, int64_t threads = 0) const;

  // A long text may be encoded in parts that end there, and has the same ids.
  SectionEnds section_ends() const;

  // Special tokens are left out unless asked for. TS_CHECK_IO on an id that the
  // vocabulary does not have.
  std::string decode(std::span<const int64_t> ids,
                     bool special_tokens = false) const;
  // The bytes themselves, which need not be UTF-8.
  std::string decode_bytes(std::span<const int64_t> ids,
                           bool special_tokens = false) const;

  const TokenizerSpec& spec() const;
  // tokenizer.json's text.
  std::string to_json() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::data
