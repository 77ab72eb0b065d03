// What a checkpoint is, beside its tensors: by what its writer put in the
// manifest.
#pragma once

#include <string>

#include "tessera/core/detail/json.h"

namespace tessera::cli {

// Of Manifest::extra: who wrote it and how it is read, the optimizer whose
// states it has, and the words that a program of one's own gave.
detail::Json words_of(const std::string& extra);

}  // namespace tessera::cli
