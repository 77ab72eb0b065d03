#include "tessera/data/detail/sections.h"

namespace tessera::data::detail {
namespace {

constexpr size_t kSectionBytes = size_t{1} << 20;

size_t end_of_section(std::string_view text, size_t begin) {
  for (size_t at = begin + kSectionBytes; at < text.size(); ++at) {
    const int before = text[at - 1] | 0x20;
    if (text[at] == ' ' && before >= 'a' && before <= 'z') return at;
  }
  return text.size();
}

}  // namespace

void append_sections(std::string_view text,
                     std::vector<std::string_view>& sections) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = end_of_section(text, at);
    sections.push_back(text.substr(at, end - at));
    at = end;
  }
}

}  // namespace tessera::data::detail
