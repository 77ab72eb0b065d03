#include "tessera/data/detail/sections.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "tessera/data/detail/utf8.h"

namespace tessera::data::detail {
namespace {

constexpr size_t kSectionBytes = size_t{1} << 20;

// What writing without spaces has between its words: the full-width comma, the
// ideographic comma and full stop.
constexpr std::array<std::string_view, 5> kMarks = {
    " ", "\n", "\xef\xbc\x8c", "\xe3\x80\x81", "\xe3\x80\x82"};

// A letter that is the same in form C. (Some of them come apart, into a letter
// and what is none: that goes on in a run of marks.)
bool is_kept_letter(uint32_t code_point) {
  const auto* property =
      utf8proc_get_property(static_cast<utf8proc_int32_t>(code_point));
  return property->category >= UTF8PROC_CATEGORY_LU &&
         property->category <= UTF8PROC_CATEGORY_LO &&
         property->decomp_seqindex == UINT16_MAX;
}

bool ends_in_letter(std::string_view text) {
  if (text.empty()) return false;
  size_t at = text.size() - 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xc0) == 0x80) --at;
  return is_kept_letter(next_code_point(text, at));
}

}  // namespace

size_t end_of_section(std::string_view text, size_t size, SectionEnds ends) {
  if (ends == SectionEnds::kNone) return text.size();
  const size_t marks = ends == SectionEnds::kBeforeSpaces ? 1 : kMarks.size();
  for (size_t at = std::max<size_t>(size, 1); at < text.size(); ++at) {
    const bool is_mark = std::any_of(
        kMarks.begin(), kMarks.begin() + marks,
        [&](auto mark) { return text.substr(at).starts_with(mark); });
    if (is_mark && ends_in_letter(text.substr(0, at))) return at;
  }
  return text.size();
}

void append_sections(std::string_view text, SectionEnds ends,
                     std::vector<std::string_view>& sections) {
  for (size_t at = 0; at < text.size();) {
    const size_t size = end_of_section(text.substr(at), kSectionBytes, ends);
    sections.push_back(text.substr(at, size));
    at += size;
  }
}

}  // namespace tessera::data::detail
