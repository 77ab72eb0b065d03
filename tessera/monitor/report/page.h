// One self-contained page on a run, or on several beside one another: their
// figures as charts, who sent what to whom, what happened, and how they were
// configured. No script, nothing is fetched: it opens anywhere, for ever.
#pragma once

#include <string>
#include <vector>

#include "tessera/monitor/report/run_history.h"

namespace tessera::monitor::report {

// Whether a file's text is such a page.
bool is_page(const std::string& text);

// HTML. REQUIRES: at least one.
std::string page_of(const std::vector<RunHistory>& runs);

}  // namespace tessera::monitor::report
