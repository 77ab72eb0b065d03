#include "tessera/core/units.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>

namespace tessera {
namespace {

template <typename... Args>
std::string format(const char* pattern, Args... args) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), pattern, args...);
  return text.data();
}

struct Scaled {
  double value;
  size_t unit;
};

// Divides until the value, `rounding` added, is below the step to the next
// unit: 1023.99 KiB is 1.0 MiB and not 1024.0 KiB.
Scaled scale(double value, double step, size_t last_unit, double rounding) {
  size_t unit = 0;
  for (; unit < last_unit && std::abs(value) + rounding >= step; ++unit) {
    value /= step;
  }
  return {value, unit};
}

}  // namespace

std::string bytes_text(uint64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  const auto exact = static_cast<double>(bytes);
  const auto [value, unit] =
      scale(exact, 1024, kUnits.size() - 1, bytes < 1024 ? 0 : 0.05);
  return format(unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
}

std::optional<int64_t> parse_bytes(std::string_view text) {
  int64_t value = 0;
  const auto [rest, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0) return std::nullopt;
  std::string unit(rest, text.data() + text.size());
  for (char& letter : unit) {
    letter = static_cast<char>(std::toupper(static_cast<int>(letter)));
  }
  if (unit.size() > 1 && unit.ends_with("IB")) unit.resize(unit.size() - 2);
  constexpr std::string_view kUnits = "KMGT";
  if (unit.empty() || unit == "B") return value;
  const size_t power = kUnits.find(unit[0]);
  if (unit.size() != 1 || power == kUnits.npos) return std::nullopt;
  const size_t shift = 10 * (power + 1);
  if (value > std::numeric_limits<int64_t>::max() >> shift) return std::nullopt;
  return value << shift;
}

std::string count_text(double count) {
  if (!std::isfinite(count)) return format("%f", count);
  constexpr std::array kUnits = {"", "K", "M", "B", "T"};
  const auto [value, unit] = scale(count, 1000, kUnits.size() - 1, 0.5);
  if (unit == 0) return format("%.0f", value);
  const int decimals = std::abs(value) < 9.995   ? 2
                       : std::abs(value) < 99.95 ? 1
                                                 : 0;
  return format("%.*f%s", decimals, value, kUnits[unit]);
}

std::string seconds_text(double seconds) {
  if (!std::isfinite(seconds)) return format("%f", seconds);
  if (seconds < 0) return "-" + seconds_text(-seconds);
  if (seconds < 0.9995e-3) return format("%.0fus", seconds * 1e6);
  if (seconds < 0.09995) return format("%.1fms", seconds * 1e3);
  if (seconds < 0.9995) return format("%.0fms", seconds * 1e3);
  if (seconds < 59.95) return format("%.1fs", seconds);
  const double whole = std::round(seconds);
  const double minutes = std::floor(whole / 60),
               hours = std::floor(whole / 3600);
  if (hours < 1) return format("%.0fm%02.0fs", minutes, whole - 60 * minutes);
  if (hours < 24) {
    return format("%.0fh%02.0fm", hours, minutes - 60 * hours);
  }
  const double days = std::floor(hours / 24);
  return format("%.0fd%02.0fh", days, hours - 24 * days);
}

std::string fixed(double value, int decimals) {
  return format("%.*f", decimals, value);
}

std::string percent(double share) { return fixed(100 * share, 1) + " %"; }

std::string nearest_multiples(int64_t value, int64_t step) {
  const int64_t below = value / step * step;
  return (below > 0 ? std::to_string(below) + " or " : "") +
         std::to_string(below + step);
}

std::string nearest_fitting(int64_t value, int64_t most,
                            const std::function<bool(int64_t)>& fits) {
  int64_t below = std::min(value, most + 1) - 1, above = value + 1;
  while (below > 0 && !fits(below)) --below;
  while (above <= most && !fits(above)) ++above;
  std::string text = below > 0 ? std::to_string(below) : "";
  if (above > most) return text;
  return text + (text.empty() ? "" : " or ") + std::to_string(above);
}

std::string some_of(const std::vector<std::string>& names, size_t most) {
  std::string text;
  const size_t shown = std::min(names.size(), most);
  for (size_t i = 0; i < shown; ++i) text += (i > 0 ? ", " : "") + names[i];
  if (names.size() > shown) {
    text += " and " + std::to_string(names.size() - shown) + " more";
  }
  return text;
}

}  // namespace tessera
