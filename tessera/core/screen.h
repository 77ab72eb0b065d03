// stderr, for whoever must not stand still where nobody reads it: a stopped
// terminal, a pipe whose reader hangs.
//
// What cannot be shown now is kept, up to 1 MiB, and shown with what comes next
// or at the end of the process; what is beyond that is left out, which is said.
// Threads: any; a text is shown whole.
#pragma once

#include <chrono>
#include <string_view>

namespace tessera {

void show_on_screen(std::string_view text);

// Shows what was kept, for as long as somebody reads. False: some is left.
bool show_kept(std::chrono::milliseconds patience = {});

}  // namespace tessera
