// A template's source as tokens, with white space cut as Hugging Face sets it:
// trim_blocks, lstrip_blocks, and the signs - and + in tags.
//
// Errors: Failure with the line.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::data::jinja {

enum class TokenKind {
  kData,      // text as it stands
  kBegin,     // {%
  kEnd,       // %}
  kPrint,     // {{
  kPrintEnd,  // }}
  kName,
  kString,  // its value
  kInteger,
  kFloat,
  kOperator,
  kEndOfFile,
};

struct Token {
  TokenKind kind = TokenKind::kEndOfFile;
  std::string text;
  int line = 1;
};

[[noreturn]] void fail_at(int line, const std::string& what);

// Ends with kEndOfFile.
std::vector<Token> tokenize(std::string_view source);

}  // namespace tessera::data::jinja
