#include "tessera/comm/algorithms/tuning_table.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <tuple>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/hash.h"

namespace tessera::comm::algorithms {
namespace {

using detail::Json;

constexpr const char* kFormat = "tessera-comm-table";
constexpr int64_t kVersion = 1;
constexpr std::array kVerbs = {Verb::kAllReduce, Verb::kAllGather,
                               Verb::kReduceScatter, Verb::kBroadcast,
                               Verb::kAllToAll};
constexpr std::array kKeys = {"verb",      "backend",   "ranks",
                              "min_bytes", "max_bytes", "algorithm"};

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names)
    text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::vector<std::string> verb_names() {
  std::vector<std::string> names;
  for (Verb verb : kVerbs) names.emplace_back(comm::name_of(verb));
  return names;
}

auto order_of(const TuningEntry& entry) {
  return std::tie(entry.verb, entry.backend, entry.ranks, entry.min_bytes);
}

bool same_group(const TuningEntry& one, const TuningEntry& other) {
  return std::tie(one.verb, one.backend, one.ranks) ==
         std::tie(other.verb, other.backend, other.ranks);
}

std::string described(const TuningEntry& entry) {
  return c10::str(comm::name_of(entry.verb), " on ", entry.backend, " with ",
                  entry.ranks, " ranks");
}

// Reads one document and says where in it something is wrong.
class Reader {
 public:
  Reader(const std::string& text, const std::string& source)
      : text_(text),
        source_(source),
        root_(detail::parse_json(
            text, source, {.comments = true, .exit_code = ExitCode::kConfig})) {
  }

  TuningTable table() const {
    check_keys(root_, {"format", "version", "machine", "entries"}, "the table");
    const std::string format = string(root_, "format");
    check(format == kFormat, root_["format"], "format is '", format,
          "', expected '", kFormat, "'. Is this another file?");
    const int64_t version = integer(root_, "version");
    check(version == kVersion, root_["version"], "version is ", version,
          "; this program reads ", kVersion, ". Run bench comm --tune again.");
    const Json& list = at(root_, "entries");
    check(list.is_array(), list, "entries must be a list.");
    std::vector<TuningEntry> entries;
    for (const Json& one : list) entries.push_back(entry(one));
    try {
      return TuningTable(std::move(entries), root_.contains("machine")
                                                 ? string(root_, "machine")
                                                 : "");
    } catch (const Error& error) {
      check(false, list, error.what_without_backtrace());
      throw;
    }
  }

 private:
  template <typename... Words>
  void check(bool holds, const Json& value, const Words&... words) const {
    TS_CHECK_CONFIG(holds, detail::place_of(value, text_, source_), ": ",
                    words...);
  }

  void check_keys(const Json& object, const std::vector<std::string>& known,
                  const std::string& what) const {
    check(object.is_object(), object, what, " must be an object.");
    for (const auto& [key, value] : object.items()) {
      check(std::find(known.begin(), known.end(), key) != known.end(), value,
            "unknown key ", detail::in_quotes(key), ". ", what, " has ",
            listed(known), ".");
    }
  }

  const Json& at(const Json& object, const std::string& key) const {
    check(object.contains(key), object, "the key '", key, "' is missing.");
    return object.at(key);
  }

  std::string string(const Json& object, const std::string& key) const {
    const Json& value = at(object, key);
    check(value.is_string(), value, key, " must be a string.");
    return value.get<std::string>();
  }

  int64_t integer(const Json& object, const std::string& key) const {
    const Json& value = at(object, key);
    check(value.is_number_integer(), value, key, " must be a whole number.");
    return detail::as_int(value, detail::place_of(value, text_, source_));
  }

  TuningEntry entry(const Json& one) const {
    check_keys(one, {kKeys.begin(), kKeys.end()}, "an entry");
    TuningEntry entry;
    const std::string verb = string(one, "verb");
    const auto found = std::find_if(kVerbs.begin(), kVerbs.end(), [&](Verb v) {
      return verb == comm::name_of(v);
    });
    check(found != kVerbs.end(), one.at("verb"), "verb ",
          detail::in_quotes(verb), " has no choice of algorithms. Use ",
          listed(verb_names()), ".");
    entry.verb = *found;
    entry.backend = string(one, "backend");
    entry.ranks = integer(one, "ranks");
    check(entry.ranks >= 2, one.at("ranks"), "ranks is ", entry.ranks,
          "; a group that communicates has 2 or more.");
    entry.min_bytes = integer(one, "min_bytes");
    if (one.contains("max_bytes")) entry.max_bytes = integer(one, "max_bytes");
    check(entry.min_bytes >= 0 && entry.min_bytes < entry.max_bytes,
          one.at("min_bytes"), "min_bytes is ", entry.min_bytes, ", max_bytes ",
          entry.max_bytes,
          "; sizes are counted from 0, and the first must be the lesser.");
    const std::string name = string(one, "algorithm");
    const auto algorithm = algorithm_of(name);
    check(algorithm.has_value(), one.at("algorithm"), "algorithm ",
          detail::in_quotes(name), " is not known. Use ",
          listed(algorithm_names()), ".");
    entry.algorithm = *algorithm;
    check(implements(*algorithm, entry.verb), one.at("algorithm"),
          "there is no ", verb, " by ", name, ".");
    return entry;
  }

  const std::string& text_;
  const std::string& source_;
  const Json root_;
};

Json json_of(const TuningEntry& entry) {
  Json one = Json::object();
  one["verb"] = comm::name_of(entry.verb);
  one["backend"] = entry.backend;
  one["ranks"] = entry.ranks;
  one["min_bytes"] = entry.min_bytes;
  if (entry.max_bytes != std::numeric_limits<int64_t>::max()) {
    one["max_bytes"] = entry.max_bytes;
  }
  one["algorithm"] = name_of(entry.algorithm);
  return one;
}

}  // namespace

TuningTable::TuningTable(std::vector<TuningEntry> entries, std::string machine)
    : entries_(std::move(entries)), machine_(std::move(machine)) {
  std::sort(entries_.begin(), entries_.end(),
            [](const TuningEntry& one, const TuningEntry& other) {
              return order_of(one) < order_of(other);
            });
  for (size_t i = 0; i < entries_.size(); ++i) {
    const TuningEntry& entry = entries_[i];
    TS_CHECK(implements(entry.algorithm, entry.verb), "there is no ",
             comm::name_of(entry.verb), " by ", name_of(entry.algorithm), ".");
    if (i == 0 || !same_group(entries_[i - 1], entry)) continue;
    TS_CHECK(entries_[i - 1].max_bytes <= entry.min_bytes, described(entry),
             ": the entries from ", entries_[i - 1].min_bytes, " and from ",
             entry.min_bytes, " bytes overlap. Each size has one algorithm.");
  }
}

TuningTable TuningTable::parse(const std::string& text,
                               const std::string& source) {
  return Reader(text, source).table();
}

TuningTable TuningTable::read(const std::filesystem::path& path) {
  return parse(read_file(path), path.string());
}

TuningTable TuningTable::from_environment() {
  const char* path = std::getenv("TESSERA_COMM_TABLE");
  if (path == nullptr || *path == '\0') return {};
  return read(path);
}

Algorithm TuningTable::algorithm_for(Verb verb, const std::string& backend,
                                     int64_t ranks, int64_t bytes) const {
  for (const TuningEntry& entry : entries_) {
    if (entry.verb == verb && entry.backend == backend &&
        entry.ranks == ranks && entry.min_bytes <= bytes &&
        bytes < entry.max_bytes) {
      return entry.algorithm;
    }
  }
  return Algorithm::kOwn;
}

bool TuningTable::knows(const std::string& backend) const {
  return std::any_of(
      entries_.begin(), entries_.end(),
      [&](const TuningEntry& entry) { return entry.backend == backend; });
}

std::string TuningTable::to_json() const {
  std::string lines;
  for (const TuningEntry& entry : entries_) {
    lines += (lines.empty() ? "\n    " : ",\n    ") + json_of(entry).dump();
  }
  return c10::str("{\n  \"format\": \"", kFormat,
                  "\",\n  \"version\": ", kVersion,
                  ",\n  \"machine\": ", Json(machine_).dump(),
                  ",\n  \"entries\": [", lines, "\n  ]\n}\n");
}

void TuningTable::write(const std::filesystem::path& path) const {
  write_file_atomic(path, to_json());
}

std::string TuningTable::fingerprint() const {
  if (empty()) return "no table";
  std::string text;
  for (const TuningEntry& entry : entries_) text += json_of(entry).dump();
  return "table " + to_hex(hash64(text));
}

}  // namespace tessera::comm::algorithms
