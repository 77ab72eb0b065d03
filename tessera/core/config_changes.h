// What one configuration has otherwise than another.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tessera::config {

// Of the keys that are asked for, as "optimizer.lr 0.001 -> 0.01". A key that
// only one of them has is of another version: no change. Texts: as config.json
// has them, resolved.
std::vector<std::string> changes_in(
    const std::string& before, const std::string& now,
    const std::function<bool(const std::string& key)>& asked);

}  // namespace tessera::config
