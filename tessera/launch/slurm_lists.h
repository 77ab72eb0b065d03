// The short forms in which Slurm writes hosts and counts.
//
// Errors: TS_CHECK_CONFIG on what is no such list, and beyond 65,536 entries.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::launch {

// "n[1-3,07],login" as n1 n2 n3 n07 login.
std::vector<std::string> expand_hosts(const std::string& list);
// "4(x2),1" as 4 4 1.
std::vector<int64_t> expand_counts(const std::string& list);

// A whole number of 0 or more, and nothing else.
std::optional<int64_t> to_number(const std::string& text);

}  // namespace tessera::launch
