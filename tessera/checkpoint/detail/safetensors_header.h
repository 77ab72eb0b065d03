// The JSON header of a safetensors file, to and from text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/safetensors.h"

namespace tessera::checkpoint::detail {

struct SafetensorsHeader {
  std::vector<SafetensorsFile::Entry> tensors;  // by begin; bytes from the data
  Metadata metadata;
};

// Parses and checks everything but that the data ends at the file's end.
// `source` is the file's path, for messages.
SafetensorsHeader parse_header(std::string_view text,
                               const std::string& source);

// The header's text, padded with blanks so that the data after it and its
// eight bytes of length is aligned to 8.
std::string format_header(const SafetensorsHeader& header);

}  // namespace tessera::checkpoint::detail
