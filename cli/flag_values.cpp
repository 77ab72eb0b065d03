#include "cli/flag_values.h"

#include <c10/util/StringUtil.h>

#include <charconv>
#include <cmath>
#include <limits>

#include "tessera/core/printable.h"

namespace tessera::cli {
namespace {

// Whether all of the word is the number.
template <typename T>
bool read(const std::string& word, T& value) {
  const char* end = word.data() + word.size();
  const auto found = std::from_chars(word.data(), end, value);
  return found.ec == std::errc() && found.ptr == end;
}

constexpr size_t kShownAtMost = 40;  // characters of a word in a message

std::string refusal(const std::string& word, const std::string& rule) {
  const bool is_long = word.size() > kShownAtMost;
  return c10::str("\"", printable(word.substr(0, kShownAtMost)),
                  is_long ? "..." : "", "\" is no ", rule);
}

}  // namespace

CLI::Validator whole_number(int64_t least, int64_t most) {
  const std::string rule =
      most == kAnyWhole ? c10::str("whole number of ", least, " or more")
                        : c10::str("whole number from ", least, " to ", most);
  return {[=](const std::string& word) {
            int64_t value = 0;
            const bool holds =
                read(word, value) && value >= least && value <= most;
            return holds ? std::string() : refusal(word, rule);
          },
          "", "whole number"};
}

CLI::Validator number_between(double least, double most, bool above) {
  const std::string from =
      above ? c10::str("above ", least) : c10::str("of ", least, " or more");
  const std::string rule = c10::str("number ", from,
                                    most < std::numeric_limits<double>::max()
                                        ? c10::str(", at most ", most)
                                        : "");
  return {[=](const std::string& word) {
            double value = 0;
            const bool holds = read(word, value) && std::isfinite(value) &&
                               (above ? value > least : value >= least) &&
                               value <= most;
            return holds ? std::string() : refusal(word, rule);
          },
          "", "number"};
}

CLI::Validator some_path() {
  return {[](const std::string& path) {
            return path.empty() ? "a path is empty; the current folder is ."
                                : "";
          },
          ""};
}

}  // namespace tessera::cli
