#include "tessera/data/detail/jinja/tokens.h"

namespace tessera::data::jinja {

const Token& Tokens::take() {
  const Token& token = tokens_[at_];
  if (at_ + 1 < tokens_.size()) ++at_;
  return token;
}

bool Tokens::is_sign(std::string_view sign) const {
  return is(TokenKind::kOperator) && peek().text == sign;
}

bool Tokens::is_word(std::string_view word) const {
  return is(TokenKind::kName) && peek().text == word;
}

bool Tokens::is_assignment() const {
  if (!is(TokenKind::kName)) return false;
  const Token& next = tokens_[at_ + 1];  // a name is never the last token
  return next.kind == TokenKind::kOperator && next.text == "=";
}

bool Tokens::take_sign(std::string_view sign) {
  const bool here = is_sign(sign);
  if (here) take();
  return here;
}

bool Tokens::take_word(std::string_view word) {
  const bool here = is_word(word);
  if (here) take();
  return here;
}

void Tokens::expect_sign(std::string_view sign) {
  if (!take_sign(sign)) fail("'" + std::string(sign) + "' is expected");
}

void Tokens::expect_word(std::string_view word) {
  if (!take_word(word)) fail("'" + std::string(word) + "' is expected");
}

void Tokens::expect(TokenKind kind, const char* what) {
  if (!is(kind)) fail(std::string(what) + " is expected");
  take();
}

std::string Tokens::expect_name() {
  if (!is(TokenKind::kName)) fail("a name is expected");
  return take().text;
}

void Tokens::fail(const std::string& what) const {
  const std::string& here = peek().text;
  fail_at(peek().line, what + (here.empty() ? "" : ", not '" + here + "'"));
}

}  // namespace tessera::data::jinja
