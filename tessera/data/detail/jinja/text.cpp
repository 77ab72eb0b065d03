#include "tessera/data/detail/jinja/text.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "tessera/data/detail/jinja/budget.h"
#include "tessera/data/detail/utf8.h"

namespace tessera::data::jinja {
namespace {

utf8proc_category_t category_of(uint32_t point) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(point));
}

// \w of Python's re.
bool is_word(uint32_t point) {
  if (point == '_') return true;
  switch (category_of(point)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return true;
    default:
      return false;
  }
}

bool is_cased(uint32_t point) {
  const auto category = category_of(point);
  return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL ||
         category == UTF8PROC_CATEGORY_LT;
}

uint32_t to_lower(uint32_t point) {
  return utf8proc_tolower(static_cast<utf8proc_int32_t>(point));
}

// Sharp s is the one letter in use whose upper case is of two.
void append_upper(std::vector<uint32_t>& points, uint32_t point, bool title) {
  if (point == 0xdf) {
    points.insert(points.end(), {uint32_t{'S'}, uint32_t(title ? 's' : 'S')});
    return;
  }
  const auto given = static_cast<utf8proc_int32_t>(point);
  points.push_back(title ? utf8proc_totitle(given) : utf8proc_toupper(given));
}

// The first letter in upper or title case, and so the one behind each that
// `ends` a word; the others in lower case.
template <typename Ends>
std::string capitalized(std::string_view text, bool title, const Ends& ends) {
  std::vector<uint32_t> points;
  bool begins = true;
  for (const uint32_t point : code_points(text)) {
    if (begins) {
      append_upper(points, point, title);
    } else {
      points.push_back(to_lower(point));
    }
    begins = ends(point);
  }
  return text_of(points);
}

bool is_printable(uint32_t point) {
  if (point == ' ') return true;
  switch (category_of(point)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

void append_quoted(std::string& text, uint32_t point, char quote) {
  if (point == '\\' || point == static_cast<uint32_t>(quote)) {
    text += '\\';
    text += static_cast<char>(point);
  } else if (point == '\n') {
    text += "\\n";
  } else if (point == '\r') {
    text += "\\r";
  } else if (point == '\t') {
    text += "\\t";
  } else if (is_printable(point)) {
    detail::append_code_point(text, point);
  } else if (point < 0x100) {
    text += "\\x" + hexadecimal(point, 2);
  } else if (point < 0x10000) {
    text += "\\u" + hexadecimal(point, 4);
  } else {
    text += "\\U" + hexadecimal(point, 8);
  }
}

void add_part(std::vector<std::string>& parts, std::string_view part) {
  constexpr int64_t kBytesOfPart = sizeof(std::string);
  use_bytes(std::ssize(part) + kBytesOfPart);
  parts.emplace_back(part);
}

// Counts a text's bytes some at a time while it grows.
class Growth {
 public:
  void to(const std::string& text) {
    constexpr size_t kSome = 4096;
    if (text.size() < counted_ + kSome) return;
    use_bytes(static_cast<int64_t>(text.size() - counted_));
    counted_ = text.size();
  }

 private:
  size_t counted_ = 0;
};

// Where what is no white space begins, from `at` on.
size_t skip_space(std::string_view text, size_t at) {
  while (at < text.size()) {
    size_t next = at;
    if (!is_space(detail::next_code_point(text, next))) break;
    at = next;
  }
  return at;
}

template <typename In>
std::string strip_if(std::string_view text, Side side, const In& in) {
  const std::vector<uint32_t> points = code_points(text);
  size_t first = 0;
  size_t last = points.size();
  if (side != Side::kRight) {
    while (first < last && in(points[first])) ++first;
  }
  if (side != Side::kLeft) {
    while (last > first && in(points[last - 1])) --last;
  }
  return text_of({points.begin() + static_cast<int64_t>(first),
                  points.begin() + static_cast<int64_t>(last)});
}

}  // namespace

std::string hexadecimal(uint32_t value, int digits) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (int i = digits - 1; i >= 0; --i) {
    text += kDigits[(value >> (4 * i)) & 15];
  }
  return text;
}

std::vector<uint32_t> code_points(std::string_view text) {
  use_steps(std::ssize(text));
  std::vector<uint32_t> points;
  points.reserve(length_of(text));
  for (size_t at = 0; at < text.size();) {
    points.push_back(detail::next_code_point(text, at));
  }
  return points;
}

std::string text_of(const std::vector<uint32_t>& points) {
  std::string text;
  for (const uint32_t point : points) detail::append_code_point(text, point);
  return text;
}

int64_t length_of(std::string_view text) {
  use_scan(std::ssize(text));
  return std::count_if(text.begin(), text.end(),
                       [](char byte) { return (byte & 0xc0) != 0x80; });
}

bool is_space(uint32_t point) {
  return (point >= 9 && point <= 13) || (point >= 0x1c && point <= 0x20) ||
         point == 0x85 || point == 0xa0 || point == 0x1680 ||
         (point >= 0x2000 && point <= 0x200a) || point == 0x2028 ||
         point == 0x2029 || point == 0x202f || point == 0x205f ||
         point == 0x3000;
}

std::string strip(std::string_view text, Side side) {
  return strip_if(text, side, is_space);
}

std::string strip(std::string_view text, std::string_view set, Side side) {
  const std::vector<uint32_t> wanted = code_points(set);
  return strip_if(text, side, [&](uint32_t point) {
    use_scan(std::ssize(set));
    return std::find(wanted.begin(), wanted.end(), point) != wanted.end();
  });
}

std::string upper(std::string_view text) {
  std::vector<uint32_t> points;
  for (const uint32_t point : code_points(text)) {
    append_upper(points, point, /*title=*/false);
  }
  return text_of(points);
}

std::string lower(std::string_view text) {
  std::vector<uint32_t> points = code_points(text);
  std::transform(points.begin(), points.end(), points.begin(), to_lower);
  return text_of(points);
}

std::string capitalize(std::string_view text) {
  return capitalized(text, /*title=*/true, [](uint32_t) { return false; });
}

std::string title(std::string_view text) {
  return capitalized(text, /*title=*/true,
                     [](uint32_t point) { return !is_cased(point); });
}

std::string title_of_words(std::string_view text) {
  return capitalized(text, /*title=*/false, [](uint32_t point) {
    return is_space(point) || point == '-' || point == '(' || point == '{' ||
           point == '[' || point == '<';
  });
}

int64_t count_words(std::string_view text) {
  int64_t count = 0;
  bool in_word = false;
  for (const uint32_t point : code_points(text)) {
    const bool is_part = is_word(point);
    count += is_part && !in_word ? 1 : 0;
    in_word = is_part;
  }
  return count;
}

bool is_digit(uint32_t point) {
  // Digits of Unicode that are no decimals: above and below the line, ringed,
  // in brackets, before a stop, ringed in other forms.
  constexpr std::pair<uint32_t, uint32_t> kOthers[] = {
      {0xb2, 0xb3},       {0xb9, 0xb9},       {0x1369, 0x1371},
      {0x19da, 0x19da},   {0x2070, 0x2070},   {0x2074, 0x2079},
      {0x2080, 0x2089},   {0x2460, 0x2468},   {0x2474, 0x247c},
      {0x2488, 0x2490},   {0x24ea, 0x24ea},   {0x24f5, 0x24fd},
      {0x24ff, 0x24ff},   {0x2776, 0x277e},   {0x2780, 0x2788},
      {0x278a, 0x2792},   {0x10a40, 0x10a43}, {0x10e60, 0x10e68},
      {0x11052, 0x1105a}, {0x1f100, 0x1f10a}};
  return category_of(point) == UTF8PROC_CATEGORY_ND ||
         std::ranges::any_of(kOthers, [&](const auto& range) {
           return point >= range.first && point <= range.second;
         });
}

// By memmem, which takes no more than the sizes of both.
size_t find_text(std::string_view text, std::string_view wanted) {
  if (wanted.empty()) return 0;
  const void* found =
      memmem(text.data(), text.size(), wanted.data(), wanted.size());
  const size_t at = found == nullptr
                        ? std::string_view::npos
                        : static_cast<const char*>(found) - text.data();
  use_scan(static_cast<int64_t>(std::min(at, text.size()) + wanted.size()));
  return at;
}

size_t find_last_text(std::string_view text, std::string_view wanted) {
  if (wanted.size() > text.size()) return std::string_view::npos;
  size_t at = text.size() - wanted.size() + 1;
  while (at-- > 0) {
    use_scan(wanted.empty() || text[at] == wanted[0] ? std::ssize(wanted) : 0);
    if (text.substr(at).starts_with(wanted)) return at;
  }
  return std::string_view::npos;
}

std::vector<std::string> split(std::string_view text, int64_t limit) {
  std::vector<std::string> parts;
  use_scan(std::ssize(text));
  for (size_t at = skip_space(text, 0); at < text.size();) {
    if (limit >= 0 && std::ssize(parts) == limit) {
      add_part(parts, text.substr(at));  // with what is behind it, as in Python
      break;
    }
    size_t end = at;
    while (end < text.size()) {
      size_t next = end;
      if (is_space(detail::next_code_point(text, next))) break;
      end = next;
    }
    add_part(parts, text.substr(at, end - at));
    at = skip_space(text, end);
  }
  return parts;
}

std::vector<std::string> split(std::string_view text,
                               std::string_view separator, int64_t limit) {
  std::vector<std::string> parts;
  while (limit < 0 || static_cast<int64_t>(parts.size()) < limit) {
    const size_t at = find_text(text, separator);
    if (at == std::string_view::npos) break;
    add_part(parts, text.substr(0, at));
    text.remove_prefix(at + separator.size());
  }
  parts.emplace_back(text);
  return parts;
}

std::vector<std::string> split_right(std::string_view text,
                                     std::string_view separator,
                                     int64_t limit) {
  std::vector<std::string> parts;
  while (limit < 0 || static_cast<int64_t>(parts.size()) < limit) {
    const size_t at = find_last_text(text, separator);
    if (at == std::string_view::npos) break;
    add_part(parts, text.substr(at + separator.size()));
    text = text.substr(0, at);
  }
  parts.emplace_back(text);
  std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string> split_lines(std::string_view text) {
  use_scan(std::ssize(text));
  std::vector<std::string> lines;
  std::string line;
  bool open = false;
  for (size_t at = 0; at < text.size();) {
    const uint32_t point = detail::next_code_point(text, at);
    const bool ends = (point >= 10 && point <= 13) ||
                      (point >= 0x1c && point <= 0x1e) || point == 0x85 ||
                      point == 0x2028 || point == 0x2029;
    open = !ends;
    if (!ends) {
      detail::append_code_point(line, point);
      continue;
    }
    if (point == '\r' && at < text.size() && text[at] == '\n') ++at;
    add_part(lines, std::exchange(line, ""));
  }
  if (open) lines.push_back(line);
  return lines;
}

std::string replace(std::string_view text, std::string_view from,
                    std::string_view to, int64_t limit) {
  use_scan(std::ssize(text));
  const auto use = [&](size_t before) {
    use_bytes(static_cast<int64_t>(before + to.size()));
  };
  std::string result;
  if (from.empty()) {  // before every code point, and at the end
    size_t at = 0;
    while (at < text.size() && limit != 0) {
      const size_t start = at;
      detail::next_code_point(text, at);
      use(at - start);
      result.append(to).append(text.substr(start, at - start));
      if (limit > 0) --limit;
    }
    return result.append(limit == 0 ? text.substr(at) : to);
  }
  while (limit != 0) {
    const size_t at = find_text(text, from);
    if (at == std::string_view::npos) break;
    use(at);
    result.append(text.substr(0, at)).append(to);
    text.remove_prefix(at + from.size());
    if (limit > 0) --limit;
  }
  return result.append(text);
}

std::string repr_of_text(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const bool has_double = text.find('"') != std::string_view::npos;
  const char quote = has_single && !has_double ? '"' : '\'';
  std::string result(1, quote);
  Growth growth;
  for (const uint32_t point : code_points(text)) {
    append_quoted(result, point, quote);
    growth.to(result);
  }
  return result + quote;
}

std::string escape_html(std::string_view text) {
  use_scan(std::ssize(text));
  std::string result;
  Growth growth;
  for (const char byte : text) {
    growth.to(result);
    switch (byte) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&#34;";
        break;
      case '\'':
        result += "&#39;";
        break;
      default:
        result += byte;
    }
  }
  return result;
}

}  // namespace tessera::data::jinja
