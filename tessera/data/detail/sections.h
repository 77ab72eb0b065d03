// Long text in sections that threads work on by themselves.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "tessera/data/tokenizer_spec.h"

namespace tessera::data::detail {

// Appends `text` in sections of about a MiB. They end between a letter that
// form C keeps and a space, or another mark (`ends`), where no word of any
// pattern and no composition goes on: the words of the sections are the words
// of the text.
void append_sections(std::string_view text, SectionEnds ends,
                     std::vector<std::string_view>& sections);

// The first end of a section that is `size` bytes or more behind the start.
// REQUIRES: `text` is valid UTF-8.
size_t end_of_section(std::string_view text, size_t size, SectionEnds ends);

}  // namespace tessera::data::detail
