// What a command says about something: as text for people.
#pragma once

#include "tessera/core/detail/json.h"

namespace tessera::cli {

// Scalars become lines, lists of objects tables, and of what has many figures
// (a run's last step, its summary) the few that are looked for first.
void print_description(const detail::Json& description);

}  // namespace tessera::cli
