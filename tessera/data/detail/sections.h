// Long text in sections that threads work on by themselves.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace tessera::data::detail {

// Appends `text` in sections of about a MiB. They end between an ASCII letter
// and a space, where no word of any pattern and no composition goes on: the
// words of the sections are the words of the text.
void append_sections(std::string_view text,
                     std::vector<std::string_view>& sections);

// The first end of a section that is `size` bytes or more behind the start.
size_t end_of_section(std::string_view text, size_t size);

}  // namespace tessera::data::detail
