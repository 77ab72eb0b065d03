// Where the keys that a message names were given: for what is found wrong
// between several sections, which know their values alone.
#pragma once

#include <string>

#include "tessera/core/config.h"

namespace tessera::config {

// The message, and behind it the place of each key in it that was given, by a
// file or a flag, and whose place it does not say itself:
// "... (zero.stage: run.json:3:14)". What stands behind a place in another file
// is about that one.
std::string with_places(const std::string& message,
                        const Provenance& provenance);

}  // namespace tessera::config
