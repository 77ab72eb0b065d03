#include "tessera/data/detail/jinja/lexer.h"

#include <algorithm>
#include <array>

#include "tessera/data/detail/jinja/text.h"
#include "tessera/data/detail/jinja/value.h"
#include "tessera/data/detail/utf8.h"

namespace tessera::data::jinja {
namespace {

bool is_name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         (c & 0x80) != 0;
}
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Lines end with \n; one newline at the end is left out, as Jinja2 does.
std::string normalized(std::string_view source) {
  std::string text = replace(source, "\r\n", "\n");
  std::replace(text.begin(), text.end(), '\r', '\n');
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(normalized(source)) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) data();
    push(TokenKind::kEndOfFile, "");
    return std::move(tokens_);
  }

 private:
  std::string_view rest() const {
    return std::string_view(source_).substr(at_);
  }
  bool next_is(std::string_view text) const { return rest().starts_with(text); }

  void advance(size_t count) {
    line_ += static_cast<int>(
        std::count(source_.begin() + static_cast<int64_t>(at_),
                   source_.begin() + static_cast<int64_t>(at_ + count), '\n'));
    at_ += count;
  }

  void push(TokenKind kind, std::string text) {
    tokens_.push_back({kind, std::move(text), line_});
  }

  void skip_space() {
    while (at_ < source_.size()) {
      size_t end = at_;
      if (!is_space(detail::next_code_point(source_, end))) return;
      advance(end - at_);
    }
  }

  // Text up to the next tag, then the tag.
  void data() {
    size_t tag = at_;
    while (true) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos || tag + 1 == source_.size()) {
        push_data(source_.substr(at_));
        advance(source_.size() - at_);
        return;
      }
      const char kind = source_[tag + 1];
      if (kind == '%' || kind == '{' || kind == '#') break;
      ++tag;
    }
    const char kind = source_[tag + 1];
    const char sign = tag + 2 < source_.size() ? source_[tag + 2] : ' ';
    push_data(cut(at_, tag, sign, kind != '{'));
    advance(tag - at_ + 2);
    if (sign == '-' || sign == '+') advance(1);
    if (kind == '#') {
      comment();
    } else if (kind == '%') {
      block();
    } else {
      push(TokenKind::kPrint, "");
      expression("}}", TokenKind::kPrintEnd);
    }
  }

  void push_data(std::string text) {
    if (!text.empty()) push(TokenKind::kData, std::move(text));
  }

  // What is left of the text between `begin` and a tag.
  std::string cut(size_t begin, size_t tag, char sign, bool is_block) const {
    std::string text = source_.substr(begin, tag - begin);
    if (sign == '-') return strip(text, Side::kRight);
    if (sign == '+' || !is_block) return text;
    const size_t newline = text.rfind('\n');
    const size_t start = newline == std::string::npos ? 0 : newline + 1;
    const bool line_starts =
        start > 0 || begin == 0 || source_[begin - 1] == '\n';
    const bool blank = strip(std::string_view(text).substr(start)).empty();
    return line_starts && blank ? text.substr(0, start) : text;
  }

  // Behind a tag's end: `close` with what its sign takes away.
  bool take_end(std::string_view close, bool trims_newline) {
    if (next_is("-" + std::string(close))) {
      advance(1 + close.size());
      skip_space();
      return true;
    }
    if (trims_newline && next_is("+" + std::string(close))) {
      advance(1 + close.size());
      return true;
    }
    if (!next_is(close)) return false;
    advance(close.size());
    if (trims_newline && next_is("\n")) advance(1);
    return true;
  }

  void comment() {
    const int line = line_;
    while (!take_end("#}", /*trims_newline=*/true)) {
      if (at_ == source_.size()) fail_at(line, "a comment has no end");
      advance(1);
    }
  }

  void block() {
    skip_space();
    if (next_is("raw")) {
      const size_t saved = at_;
      advance(3);
      skip_space();
      if (take_end("%}", /*trims_newline=*/false)) return raw();
      at_ = saved;
    }
    push(TokenKind::kBegin, "");
    expression("%}", TokenKind::kEnd);
  }

  void raw() {
    const int line = line_;
    const size_t start = at_;
    for (size_t tag = source_.find("{%", at_); tag != std::string::npos;
         tag = source_.find("{%", tag + 2)) {
      advance(tag - at_ + 2);
      const char sign = at_ < source_.size() ? source_[at_] : ' ';
      if (sign == '-' || sign == '+') advance(1);
      skip_space();
      if (!next_is("endraw")) continue;
      advance(6);
      skip_space();
      if (!take_end("%}", /*trims_newline=*/true)) continue;
      push_data(cut(start, tag, sign, /*is_block=*/true));
      return;
    }
    fail_at(line, "'raw' has no 'endraw'");
  }

  void expression(std::string_view close, TokenKind end) {
    std::string open;  // brackets that wait for their ends
    const bool is_block = end == TokenKind::kEnd;
    while (true) {
      skip_space();
      if (at_ == source_.size()) {
        fail_at(line_, "a tag has no '" + std::string(close) + "'");
      }
      const int line = line_;
      if (open.empty() && take_end(close, is_block)) {
        tokens_.push_back({end, "", line});
        return;
      }
      const char c = source_[at_];
      if (is_name_start(c)) {
        name();
      } else if (is_digit(c)) {
        number();
      } else if (c == '"' || c == '\'') {
        string(c);
      } else {
        sign(open);
      }
    }
  }

  void name() {
    const size_t start = at_;
    while (at_ < source_.size() &&
           (is_name_start(source_[at_]) || is_digit(source_[at_]))) {
      ++at_;
    }
    push(TokenKind::kName, source_.substr(start, at_ - start));
  }

  void digits() {
    while (at_ < source_.size() &&
           (is_digit(source_[at_]) || source_[at_] == '_')) {
      ++at_;
    }
  }

  void number() {
    const size_t start = at_;
    bool real = false;
    digits();
    if (at_ + 1 < source_.size() && source_[at_] == '.' &&
        is_digit(source_[at_ + 1])) {
      real = true;
      ++at_;
      digits();
    }
    if (at_ < source_.size() && (source_[at_] == 'e' || source_[at_] == 'E')) {
      const size_t sign = at_ + 1;
      const bool signed_exponent =
          sign < source_.size() &&
          (source_[sign] == '+' || source_[sign] == '-');
      const size_t digit = sign + static_cast<size_t>(signed_exponent);
      if (digit < source_.size() && is_digit(source_[digit])) {
        real = true;
        at_ = digit;
        digits();
      }
    }
    std::string text = source_.substr(start, at_ - start);
    std::erase(text, '_');
    push(real ? TokenKind::kFloat : TokenKind::kInteger, text);
  }

  void string(char quote) {
    const int line = line_;
    std::string value;
    advance(1);
    while (true) {
      if (at_ == source_.size()) fail_at(line, "text in quotes has no end");
      const char c = source_[at_];
      advance(1);
      if (c == quote) break;
      if (c == '\\') {
        escape(value, line);
      } else {
        value += c;
      }
    }
    tokens_.push_back({TokenKind::kString, std::move(value), line});
  }

  void escape(std::string& value, int line) {
    if (at_ == source_.size()) fail_at(line, "text in quotes has no end");
    const char c = source_[at_];
    advance(1);
    constexpr std::string_view kNames = "ntrbfav\\'\"";
    constexpr std::string_view kValues = "\n\t\r\b\f\a\v\\'\"";
    const size_t named = kNames.find(c);
    if (named != std::string_view::npos) {
      value += kValues[named];
    } else if (c == 'x') {
      code_point(value, 2, 16, line);
    } else if (c == 'u') {
      code_point(value, 4, 16, line);
    } else if (c == 'U') {
      code_point(value, 8, 16, line);
    } else if (c >= '0' && c <= '7') {
      --at_;
      size_t digits = 1;
      while (digits < 3 && at_ + digits < source_.size() &&
             source_[at_ + digits] >= '0' && source_[at_ + digits] <= '7') {
        ++digits;
      }
      code_point(value, digits, 8, line);
    } else if (c != '\n') {
      value += '\\';
      value += c;
    }
  }

  void code_point(std::string& value, size_t digits, int base, int line) {
    size_t used = 0;
    uint64_t point = 0;
    const std::string text = source_.substr(at_, digits);
    try {
      point = std::stoul(text, &used, base);
    } catch (const std::exception&) {
      used = 0;
    }
    if (used != digits || point > 0x10ffff ||
        (point >= 0xd800 && point < 0xe000)) {
      fail_at(line, "'\\" + text + "' is no character");
    }
    detail::append_code_point(value, static_cast<uint32_t>(point));
    advance(digits);
  }

  void sign(std::string& open) {
    constexpr std::array<std::string_view, 6> kDouble = {
        "//", "**", "==", "!=", ">=", "<="};
    for (const std::string_view two : kDouble) {
      if (!next_is(two)) continue;
      push(TokenKind::kOperator, std::string(two));
      advance(2);
      return;
    }
    const char c = source_[at_];
    if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) ==
        std::string_view::npos) {
      fail_at(line_, std::string("'") + c + "' is not expected");
    }
    constexpr std::string_view kOpen = "([{";
    constexpr std::string_view kClose = ")]}";
    const size_t closes = kClose.find(c);
    if (kOpen.find(c) != std::string_view::npos) open += c;
    if (closes != std::string_view::npos) {
      if (open.empty() || open.back() != kOpen[closes]) {
        fail_at(line_, std::string("'") + c + "' closes nothing");
      }
      open.pop_back();
    }
    push(TokenKind::kOperator, std::string(1, c));
    advance(1);
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

void fail_at(int line, const std::string& what) {
  throw Failure("line " + std::to_string(line) + ": " + what);
}

std::vector<Token> tokenize(std::string_view source) {
  return Lexer(source).run();
}

}  // namespace tessera::data::jinja
