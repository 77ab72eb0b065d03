#include "tessera/data/detail/sections.h"

namespace tessera::data::detail {
namespace {

constexpr size_t kSectionBytes = size_t{1} << 20;

}  // namespace

size_t end_of_section(std::string_view text, size_t size) {
  for (size_t at = size > 0 ? size : 1; at < text.size(); ++at) {
    const int before = text[at - 1] | 0x20;
    if (text[at] == ' ' && before >= 'a' && before <= 'z') return at;
  }
  return text.size();
}

void append_sections(std::string_view text,
                     std::vector<std::string_view>& sections) {
  for (size_t at = 0; at < text.size();) {
    const size_t size = end_of_section(text.substr(at), kSectionBytes);
    sections.push_back(text.substr(at, size));
    at += size;
  }
}

}  // namespace tessera::data::detail
