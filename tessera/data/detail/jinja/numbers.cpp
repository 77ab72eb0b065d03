#include "tessera/data/detail/jinja/numbers.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "tessera/data/detail/jinja/text.h"

namespace tessera::data::jinja {
namespace {

template <typename T>
std::optional<T> parsed(const std::string& text) {
  const std::string stripped = strip(text);
  // As Python reads them: "+5", "1_000", and no "nan(1)".
  const auto is_decimal = [](char c) { return c >= '0' && c <= '9'; };
  std::string plain;
  for (size_t at = 0; at < stripped.size(); ++at) {
    const char c = stripped[at];
    const bool is_inside = at > 0 && at + 1 < stripped.size();
    const bool joins = c == '_' && is_inside && is_decimal(stripped[at - 1]) &&
                       is_decimal(stripped[at + 1]);
    const bool is_sign =
        c == '+' && at == 0 && stripped.size() > 1 && stripped[1] != '-';
    if (c == '(') return std::nullopt;
    if (!joins && !is_sign) plain += c;
  }
  T number{};
  const char* end = plain.data() + plain.size();
  const auto [at, error] = std::from_chars(plain.data(), end, number);
  if (error != std::errc() || at != end) return std::nullopt;
  return number;
}

// To a multiple of 10^-digits, of two that are as near the even one.
Value rounded_whole(int64_t number, int64_t digits) {
  constexpr int64_t kMostDigits = 18;
  constexpr int64_t kHalf = 5'000'000'000'000'000'000;  // of 10^19
  if (digits >= 0) return number;
  if (digits < -kMostDigits) {
    const bool goes_up =
        digits == -kMostDigits - 1 && (number > kHalf || number < -kHalf);
    if (goes_up) throw Failure("the filter round has no number that large");
    return 0;
  }
  int64_t unit = 1;
  for (int64_t i = digits; i < 0; ++i) unit *= 10;
  const int64_t rest = std::abs(number % unit);
  const int64_t down = number - number % unit;
  const bool is_odd = number / unit % 2 != 0;
  const bool goes_up = rest > unit - rest || (rest == unit - rest && is_odd);
  int64_t rounded = down;
  if (goes_up &&
      __builtin_add_overflow(down, number < 0 ? -unit : unit, &rounded)) {
    throw Failure("the filter round has no number that large");
  }
  return rounded;
}

}  // namespace

std::optional<int64_t> whole_number_in(const std::string& text) {
  return parsed<int64_t>(text);
}

std::optional<double> number_in(const std::string& text) {
  return parsed<double>(text);
}

Value rounded(const Value& value, int64_t digits) {
  if (!value.floating()) return rounded_whole(value.as_integer(), digits);
  const double number = *value.floating();
  if (!std::isfinite(number)) return number;
  if (digits < 0) {
    const double unit = std::pow(10.0, static_cast<double>(-digits));
    return std::isinf(unit) ? 0.0 * number
                            : std::nearbyint(number / unit) * unit;
  }
  constexpr int64_t kAll = 330;  // digits of the smallest number
  std::array<char, 700> text{};
  std::snprintf(text.data(), text.size(), "%.*f",
                static_cast<int>(std::min(digits, kAll)), number);
  return std::strtod(text.data(), nullptr);
}

}  // namespace tessera::data::jinja
