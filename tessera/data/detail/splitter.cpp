#include "tessera/data/detail/splitter.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>

#include "tessera/core/error.h"

namespace tessera::data::detail {
namespace {

struct KnownPattern {
  SplitPattern pattern;
  std::string regex;
};

const std::array<KnownPattern, 3>& known_patterns() {
  static const std::array<KnownPattern, 3> patterns = {{
      {SplitPattern::kGpt2, R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+)"
                            R"(| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
      {SplitPattern::kLlama3,
       R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
       R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
      {SplitPattern::kQwen2,
       R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})"
       R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
  }};
  return patterns;
}

// The same expression with Unicode's White_Space written out: PCRE2's own \s
// also has U+180E, which Unicode took out and Hugging Face's engine with it.
std::string with_unicode_space(const std::string& regex) {
  const std::string space =
      R"(\x{9}-\x{D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028})"
      R"(\x{2029}\x{202F}\x{205F}\x{3000})";
  std::string result;
  bool in_class = false;
  for (size_t i = 0; i < regex.size(); ++i) {
    const char c = regex[i];
    if (c == '\\' && regex[i + 1] == 's') {
      result += in_class ? space : "[" + space + "]";
      ++i;
    } else if (c == '\\' && regex[i + 1] == 'S') {
      result += "[^" + space + "]";
      ++i;
    } else if (c == '\\') {
      result += regex.substr(i++, 2);
    } else {
      in_class = c == '[' || (in_class && c != ']');
      result += c;
    }
  }
  return result;
}

std::string message_of(int code) {
  std::array<PCRE2_UCHAR, 256> message{};
  pcre2_get_error_message(code, message.data(), message.size());
  return reinterpret_cast<const char*>(message.data());
}

}  // namespace

const std::string& regex_of(SplitPattern pattern) {
  return known_patterns()[static_cast<size_t>(pattern)].regex;
}

std::optional<SplitPattern> pattern_of(const std::string& regex) {
  for (const KnownPattern& known : known_patterns()) {
    if (known.regex == regex) return known.pattern;
  }
  return {};
}

struct Splitter::Code {
  explicit Code(const std::string& regex) {
    int error = 0;
    PCRE2_SIZE place = 0;
    // Anchored: every word begins where the last one ended.
    code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(regex.data()),
                         regex.size(), PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED,
                         &error, &place, nullptr);
    TORCH_INTERNAL_ASSERT(code != nullptr, "the expression ", regex, " at ",
                          place, ": ", message_of(error));
    // Where the library was built without a compiler it interprets instead.
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    context = pcre2_match_context_create(nullptr);
    // A run of spaces may be as long as the text.
    pcre2_set_match_limit(context, UINT32_MAX);
  }
  ~Code() {
    pcre2_match_context_free(context);
    pcre2_code_free(code);
  }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;

  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;
};

Splitter::Splitter(SplitPattern pattern)
    : code_(std::make_unique<Code>(with_unicode_space(regex_of(pattern)))) {}
Splitter::~Splitter() = default;
Splitter::Splitter(Splitter&&) noexcept = default;
Splitter& Splitter::operator=(Splitter&&) noexcept = default;

struct WordCursor::Match {
  explicit Match(const Splitter::Code& code_of_splitter)
      : code(code_of_splitter),
        data(pcre2_match_data_create(1, nullptr)),
        range(pcre2_get_ovector_pointer(data)) {}
  ~Match() { pcre2_match_data_free(data); }
  Match(const Match&) = delete;
  Match& operator=(const Match&) = delete;

  const Splitter::Code& code;
  pcre2_match_data* data;
  PCRE2_SIZE* range;
};

WordCursor::WordCursor(const Splitter& splitter, std::string_view text)
    : match_(std::make_unique<Match>(*splitter.code_)), text_(text) {}
WordCursor::~WordCursor() = default;

bool WordCursor::next(std::string_view& word) {
  if (at_ >= text_.size()) return false;
  const int result =
      pcre2_match(match_->code.code, reinterpret_cast<PCRE2_SPTR>(text_.data()),
                  text_.size(), at_, PCRE2_NO_UTF_CHECK, match_->data,
                  match_->code.context);
  TS_CHECK(result >= 0, "cutting text into words failed at byte ", at_, ": ",
           message_of(result));
  word = text_.substr(at_, match_->range[1] - at_);
  TORCH_INTERNAL_ASSERT(!word.empty(), "an empty word at byte ", at_);
  at_ += word.size();
  return true;
}

}  // namespace tessera::data::detail
