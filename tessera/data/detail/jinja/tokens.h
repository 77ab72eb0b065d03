// The tokens of a template, one after another, as parsers take them.
//
// Errors: Failure with the line and what was expected.
#pragma once

#include <charconv>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/data/detail/jinja/lexer.h"

namespace tessera::data::jinja {

class Tokens {
 public:
  explicit Tokens(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  const Token& peek() const { return tokens_[at_]; }
  const Token& take();
  bool is(TokenKind kind) const { return peek().kind == kind; }
  bool is_sign(std::string_view sign) const;
  bool is_word(std::string_view word) const;
  bool is_assignment() const;             // a name and "="
  bool take_sign(std::string_view sign);  // if it is next
  bool take_word(std::string_view word);
  void expect_sign(std::string_view sign);
  void expect_word(std::string_view word);
  void expect(TokenKind kind, const char* what);
  std::string expect_name();
  [[noreturn]] void fail(const std::string& what) const;

 private:
  std::vector<Token> tokens_;
  size_t at_ = 0;
};

// The number that `text`, of these tokens, is.
template <typename Number>
Number number_of(const Tokens& tokens, const std::string& text) {
  Number number{};
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) {
    tokens.fail("the number " + text + " is too large");
  }
  return number;
}

}  // namespace tessera::data::jinja
