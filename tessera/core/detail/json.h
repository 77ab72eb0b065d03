// JSON as every room reads it: strict, and with places in its messages.
// Not public: nlohmann's type stays inside source files.
#pragma once

#define JSON_DIAGNOSTIC_POSITIONS 1
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tessera/core/detail/indexed_object.h"
#include "tessera/core/error.h"

namespace tessera::detail {

// Keys keep the order of the file.
using Json = nlohmann::basic_json<IndexedObject>;

struct JsonLimits {
  size_t max_bytes = size_t{64} << 20;
  int max_depth = 64;
  bool comments = false;                        // accept // and /* */
  ExitCode exit_code = ExitCode::kInputOutput;  // of the error
};

// Of a file of configuration.
inline constexpr size_t kMaxConfigBytes = size_t{4} << 20;

// Parses `text`. Refuses duplicate keys, depth, size, bad UTF-8, numbers beyond
// double and trailing text, with "source:line:column: what".
Json parse_json(const std::string& text, const std::string& source,
                const JsonLimits& limits = {});

// A file's text, for parse_json(); one that is too large is refused unread.
std::string read_json_text(const std::filesystem::path& path,
                           const JsonLimits& limits = {});

// "source:line:column" of a value parsed from `text`, or of its key.
std::string place_of(const Json& value, const std::string& text,
                     const std::string& source);
std::string place_of_key(const Json& value, const std::string& text,
                         const std::string& source);

// `text` as JSON has it, and a value in one line, cut where they are long: for
// messages. Any bytes will do.
std::string in_quotes(std::string_view text);
std::string in_one_line(const Json& value);

// Of "section.key". REQUIRES: it is there.
const Json& value_at(const Json& object, const std::string& key);

// What `read` makes of JSON from `source`, taking values by nlohmann's own
// getters; TS_CHECK_IO where one is of another type.
template <typename Read>
auto reading(const std::string& source, const Read& read) {
  try {
    return read();
  } catch (const Json::exception& error) {
    const std::string_view what = error.what();
    const size_t intro = what.find("] ");  // "[json.exception....302] "
    TS_CHECK_IO(false, source, ": ",
                intro == what.npos ? what : what.substr(intro + 2), ".");
  }
}

// Typed getters that never convert: -1 is no size, 2.9 no integer.
// `where` names the value in the message, as "config.json: hidden_size".
int64_t as_int(const Json& value, const std::string& where);
double as_double(const Json& value, const std::string& where);
bool as_bool(const Json& value, const std::string& where);
std::string as_string(const Json& value, const std::string& where);

}  // namespace tessera::detail
