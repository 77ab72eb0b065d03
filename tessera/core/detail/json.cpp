#include "tessera/core/detail/json.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <sstream>
#include <unordered_set>

#include "tessera/core/files.h"

namespace tessera::detail {
namespace {

constexpr size_t kMaxQuoted = 60;  // bytes of a text shown in a message
constexpr size_t kMaxShown = 120;  // and of a value

// "source:line:column" of a byte of `text`, both from 1.
std::string place_at(size_t byte, const std::string& text,
                     const std::string& source) {
  byte = std::min(byte, text.size());
  const auto begin = text.begin(), end = begin + static_cast<ptrdiff_t>(byte);
  const size_t newline =
      byte == 0 ? std::string::npos : text.rfind('\n', byte - 1);
  const size_t line_begin = newline == std::string::npos ? 0 : newline + 1;
  return source + ":" + std::to_string(1 + std::count(begin, end, '\n')) + ":" +
         std::to_string(byte - line_begin + 1);
}

// The byte of the quote that opens the string closed at `closing`.
size_t opening_quote(const std::string& text, size_t closing) {
  for (size_t at = closing; at-- > 0;) {
    if (text[at] != '"') continue;
    size_t backslashes = 0;
    while (backslashes < at && text[at - 1 - backslashes] == '\\') {
      ++backslashes;
    }
    if (backslashes % 2 == 0) return at;
  }
  return closing;
}

// Reads a text and tells through `seen` how far the parser has come.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** seen) : at_(at), seen_(seen) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    *seen_ = ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    auto before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const {
    return at_ == other.at_;
  }

 private:
  const char* at_;
  const char** seen_;
};

// Finds what nlohmann lets pass (duplicates, depth) without building anything.
class Inspector {
 public:
  Inspector(const std::string& text, const std::string& source,
            const JsonLimits& limits)
      : text_(text), source_(source), limits_(limits), seen_(text.data()) {}

  CountingIterator begin() { return {text_.data(), &seen_}; }
  CountingIterator end() { return {text_.data() + text_.size(), &seen_}; }

  bool null() { return true; }
  bool boolean(bool) { return true; }
  bool number_integer(int64_t) { return true; }
  bool number_unsigned(uint64_t) { return true; }
  bool number_float(double, const std::string&) { return true; }
  bool string(std::string&) { return true; }
  bool binary(Json::binary_t&) { return true; }
  bool start_object(size_t) { return descend(); }
  bool end_object() { return ascend(); }
  bool start_array(size_t) { return descend(); }
  bool end_array() { return ascend(); }

  bool key(std::string& name) {
    const size_t closing = bytes_seen() - 1;
    if (!keys_.back().insert(name).second) {
      refuse(opening_quote(text_, closing),
             "duplicate key " + in_quotes(name) + ". Remove one of the two.");
    }
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::json::exception& error) {
    // "[json.exception....] parse error at line 1, column 5: what"
    std::string what = error.what();
    for (const char* intro : {"] ", ": "}) {
      const size_t at = what.find(intro);
      if (at != std::string::npos) what.erase(0, at + 2);
      if (!what.starts_with("parse error")) break;
    }
    const size_t byte = position > 0 ? position - 1 : 0;
    if (is_behind_comma(byte)) {
      refuse(byte, c10::str("syntax error: a comma stands before this '",
                            text_[byte], "'. Remove the comma."));
    }
    constexpr size_t kSaid = 200;  // it repeats what it has read
    if (what.size() > kSaid) what = what.substr(0, kSaid) + " ...";
    refuse(byte, what + ".");
  }

 private:
  // It closes a list or an object, of which one more element was begun.
  bool is_behind_comma(size_t byte) const {
    if (byte == 0 || byte >= text_.size()) return false;
    if (text_[byte] != '}' && text_[byte] != ']') return false;
    const size_t before = text_.find_last_not_of(" \t\r\n", byte - 1);
    return before != std::string::npos && text_[before] == ',';
  }
  size_t bytes_seen() const {
    return static_cast<size_t>(seen_ - text_.data());
  }
  bool descend() {
    keys_.emplace_back();
    if (keys_.size() > static_cast<size_t>(limits_.max_depth)) {
      refuse(bytes_seen() - 1,
             c10::str("nested more than ", limits_.max_depth, " deep."));
    }
    return true;
  }
  bool ascend() {
    keys_.pop_back();
    return true;
  }
  [[noreturn]] void refuse(size_t byte, const std::string& what) const {
    throw_error(limits_.exit_code, place_at(byte, text_, source_) + ": " + what,
                {__func__, __FILE__, static_cast<uint32_t>(__LINE__)});
  }

  const std::string& text_;
  const std::string& source_;
  const JsonLimits& limits_;
  const char* seen_;
  std::vector<std::unordered_set<std::string>> keys_;  // of each open value
};

// The byte at which a value begins. The start that nlohmann gives of a string
// counts its characters after escapes are resolved; its end is right.
size_t start_of(const Json& value, const std::string& text) {
  if (!value.is_string() || value.end_pos() > text.size()) {
    return value.start_pos();
  }
  return opening_quote(text, value.end_pos() - 1);
}

std::string shown(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  if (value.is_string()) return in_quotes(value.get_ref<const std::string&>());
  return value.dump();
}

// By its mark, or by the zero beside its first letter, of JSON always an ASCII
// one.
bool is_utf16(std::string_view text) {
  if (text.starts_with("\xff\xfe") || text.starts_with("\xfe\xff")) return true;
  return text.size() >= 2 && (text[0] == '\0') != (text[1] == '\0');
}

}  // namespace

Json parse_json(const std::string& text, const std::string& source,
                const JsonLimits& limits) {
  TS_CHECK_CODE(text.size() <= limits.max_bytes, limits.exit_code, source, ": ",
                text.size(), " bytes of JSON; at most ", limits.max_bytes,
                " are read.");
  TS_CHECK_CODE(!is_utf16(text), limits.exit_code, source,
                ": is UTF-16 text, and JSON is read as UTF-8. Convert it, as "
                "with iconv -f UTF-16 -t UTF-8.");
  const size_t nul = text.find('\0');
  TS_CHECK_CODE(nul == std::string::npos, limits.exit_code,
                place_at(nul, text, source), ": a NUL byte in JSON.");
  Inspector inspector(text, source, limits);
  Json::sax_parse(inspector.begin(), inspector.end(), &inspector,
                  Json::input_format_t::json, /*strict=*/true, limits.comments);
  return Json::parse(text, /*cb=*/nullptr, /*allow_exceptions=*/true,
                     limits.comments);
}

std::string read_json_text(const std::filesystem::path& path,
                           const JsonLimits& limits) {
  return read_file(path, limits.max_bytes);
}

std::string place_of(const Json& value, const std::string& text,
                     const std::string& source) {
  return place_at(start_of(value, text), text, source);
}

std::string place_of_key(const Json& value, const std::string& text,
                         const std::string& source) {
  const auto before = [&](size_t at) {
    return text.find_last_not_of(" \t\r\n", at);
  };
  const size_t start = start_of(value, text);
  if (start == 0 || start > text.size()) return place_of(value, text, source);
  const size_t colon = before(start - 1);
  if (colon == std::string::npos || colon == 0 || text[colon] != ':') {
    return place_of(value, text, source);  // a comment stands between
  }
  const size_t closing = before(colon - 1);
  if (closing == std::string::npos || text[closing] != '"') {
    return place_of(value, text, source);
  }
  return place_at(opening_quote(text, closing), text, source);
}

std::string in_one_line(const Json& value) {
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/false,
                                Json::error_handler_t::replace);
  if (text.size() > kMaxShown) text.replace(kMaxShown, text.npos, "...");
  return text;
}

const Json& value_at(const Json& object, const std::string& key) {
  Json::json_pointer at;
  std::istringstream parts(key);
  for (std::string part; std::getline(parts, part, '.');) at /= part;
  return object.at(at);
}

std::string in_quotes(std::string_view text) {
  const bool cut = text.size() > kMaxQuoted;
  const std::string shown(text.substr(0, kMaxQuoted));
  return Json(shown).dump(-1, ' ', /*ensure_ascii=*/true,
                          Json::error_handler_t::replace) +
         (cut ? "..." : "");
}

int64_t as_int(const Json& value, const std::string& where) {
  constexpr auto kMax =
      static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  const bool fits =
      value.is_number_integer() &&
      (!value.is_number_unsigned() || value.get<uint64_t>() <= kMax);
  TS_CHECK_IO(fits, where, ": expected a whole number of 64 bits, got ",
              shown(value), ".");
  return value.get<int64_t>();
}

double as_double(const Json& value, const std::string& where) {
  TS_CHECK_IO(value.is_number(), where, ": expected a number, got ",
              shown(value), ".");
  return value.get<double>();
}

bool as_bool(const Json& value, const std::string& where) {
  TS_CHECK_IO(value.is_boolean(), where, ": expected true or false, got ",
              shown(value), ".");
  return value.get<bool>();
}

std::string as_string(const Json& value, const std::string& where) {
  TS_CHECK_IO(value.is_string(), where, ": expected a string, got ",
              shown(value), ".");
  return value.get<std::string>();
}

}  // namespace tessera::detail
