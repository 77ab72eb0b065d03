#include "tessera/core/config_changes.h"

#include <c10/util/StringUtil.h>

#include "tessera/core/detail/json.h"

namespace tessera::config {
namespace {

using Json = tessera::detail::Json;
using Asked = std::function<bool(const std::string& key)>;

void add_changes(const Json& before, const Json& now, const std::string& path,
                 const Asked& asked, std::vector<std::string>& changes) {
  for (const auto& item : now.items()) {
    const std::string key = path + item.key();
    if (!before.contains(item.key())) continue;
    const Json& old = before[item.key()];
    if (item.value().is_object() && old.is_object()) {
      add_changes(old, item.value(), key + ".", asked, changes);
    } else if (asked(key) && old != item.value()) {
      changes.push_back(
          c10::str(key, " ", old.dump(), " -> ", item.value().dump()));
    }
  }
}

}  // namespace

std::vector<std::string> changes_in(const std::string& before,
                                    const std::string& now,
                                    const Asked& asked) {
  std::vector<std::string> changes;
  add_changes(Json::parse(before), Json::parse(now), "", asked, changes);
  return changes;
}

}  // namespace tessera::config
