#include "tessera/monitor/report/chart.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>

#include "tessera/core/units.h"
#include "tessera/monitor/console.h"

namespace tessera::monitor::report {
namespace {

// Of the drawing, in its own units.
constexpr double kWidth = 560, kHeight = 230;
constexpr double kLeft = 62, kRight = 20, kTop = 10, kBottom = 26;
constexpr double kOfLetter = 6;  // wide, in a label
constexpr double kOfDot = 2.5;   // its radius
constexpr int kBuckets = 480;    // of x, about a pixel each
constexpr int kTicksOfY = 5;     // about
// Of its values, what a range spans at least: less is no change, and would fill
// the drawing.
constexpr double kLeastSpan = 1e-3;

// Wider than the values: what spans those of double must not overflow.
using Wide = long double;

struct Range {
  Wide low = std::numeric_limits<Wide>::infinity();
  Wide high = -std::numeric_limits<Wide>::infinity();

  void take(double value) {
    if (!std::isfinite(value)) return;
    low = std::min<Wide>(low, value);
    high = std::max<Wide>(high, value);
  }
  bool empty() const { return low > high; }
  // So that a constant has a place in the middle; what spans no more than
  // `least` of its values is one.
  void widen(double least = 0) {
    const Wide size = std::max(std::abs(low), std::abs(high));
    if (high - low > least * size) return;
    const Wide by = size == 0 ? 1 : size / 10;
    low -= by;
    high += by;
  }
};

// 1, 2 or 5 times a power of ten, for about `count` steps over the range.
Wide nice_step(const Range& range, int count) {
  const Wide rough = (range.high - range.low) / count;
  const Wide power = std::pow(Wide{10}, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

std::vector<Wide> ticks(const Range& range, int count, Wide finest = 0) {
  const Wide step = std::max(finest, nice_step(range, count));
  std::vector<Wide> all;
  const auto first = std::llround(std::ceil(range.low / step));
  const auto last = std::llround(std::floor(range.high / step + 1e-9));
  for (int64_t i = first; i <= last; ++i) {
    all.push_back(static_cast<Wide>(i) * step);
  }
  return all;
}

std::string number(double value) { return fixed(value, 1); }

struct Frame {
  Range x, y;
  double px(Wide value) const {
    return kLeft + part(x, value) * (kWidth - kLeft - kRight);
  }
  double py(Wide value) const {
    return kHeight - kBottom - part(y, value) * (kHeight - kTop - kBottom);
  }

 private:
  static double part(const Range& range, Wide value) {
    return static_cast<double>((value - range.low) / (range.high - range.low));
  }
};

std::string line(double x1, double y1, double x2, double y2,
                 const std::string& kind) {
  return c10::str("<line class=\"", kind, "\" x1=\"", number(x1), "\" y1=\"",
                  number(y1), "\" x2=\"", number(x2), "\" y2=\"", number(y2),
                  "\"/>");
}

// With as many digits as tell neighbours apart.
std::string tick_text(Wide value, Wide step) {
  const Wide size = std::abs(value);
  if (value == 0 || (step >= 1 && size < 1e15)) {
    return short_number(static_cast<double>(value));
  }
  const auto place = [](Wide of) {
    return static_cast<int>(std::floor(std::log10(of) + 1e-9));
  };
  std::array<char, 32> text{};
  if (step >= 1e-5 && step < 1) {
    std::snprintf(text.data(), text.size(), "%.*Lf", -place(step), value);
  } else {
    const int digits = std::max(1, place(size) - place(step) + 1);
    std::snprintf(text.data(), text.size(), "%.*Lg", digits, value);
  }
  return text.data();
}

// In the middle below its place, unless the drawing ends there.
std::string label_of_x(Wide value, const Frame& frame) {
  const std::string text = short_number(static_cast<double>(value));
  const double half = kOfLetter / 2 * static_cast<double>(text.size());
  return c10::str("<text class=\"x\" x=\"",
                  number(std::min(frame.px(value), kWidth - half)), "\" y=\"",
                  number(kHeight - 8), "\">", text, "</text>");
}

std::string axes(const Frame& frame) {
  std::string text;
  for (Wide y : ticks(frame.y, kTicksOfY)) {
    const double at = frame.py(y);
    text += line(kLeft, at, kWidth - kRight, at, "grid");
    text += c10::str("<text class=\"y\" x=\"", number(kLeft - 6), "\" y=\"",
                     number(at + 3.5), "\">",
                     tick_text(y, nice_step(frame.y, kTicksOfY)), "</text>");
  }
  for (Wide x : ticks(frame.x, 6, /*finest=*/1)) {  // steps are whole
    text += label_of_x(x, frame);
  }
  return text;
}

// The lowest and the highest value of each bucket of x, in their order; one
// that is not finite only where the bucket has no other.
Points thinned(const Points& points, const Range& x) {
  if (points.size() <= 2 * size_t{kBuckets}) return points;
  Points kept;
  const auto bucket_of = [&](Wide at) {
    return static_cast<int>((at - x.low) / (x.high - x.low) * kBuckets);
  };
  for (size_t first = 0; first < points.size();) {
    size_t end = first, lowest = first, highest = first;
    const int bucket = bucket_of(points[first].first);
    for (; end < points.size() && bucket_of(points[end].first) == bucket;
         ++end) {
      const double y = points[end].second;
      if (!std::isfinite(y)) continue;
      const bool is_first = !std::isfinite(points[lowest].second);
      if (is_first || y < points[lowest].second) lowest = end;
      if (is_first || y > points[highest].second) highest = end;
    }
    kept.push_back(points[std::min(lowest, highest)]);
    if (lowest != highest) kept.push_back(points[std::max(lowest, highest)]);
    first = end;
  }
  return kept;
}

// A line through neighbours; a point that has none is a dot.
std::string drawn(const Series& series, const Frame& frame, size_t index) {
  const Points points = thinned(series.points, frame.x);
  const auto is_there = [&](size_t i) {  // also for one before the first
    return i < points.size() && std::isfinite(points[i].second);
  };
  const std::string title = "<title>" + escaped(series.name) + "</title>";
  std::string path, dots;
  for (size_t i = 0; i < points.size(); ++i) {
    if (!is_there(i)) continue;
    const std::string x = number(frame.px(points[i].first));
    const std::string y = number(frame.py(points[i].second));
    if (is_there(i - 1) || is_there(i + 1)) {
      path += c10::str(is_there(i - 1) ? "L" : "M", x, " ", y);
    } else {
      dots +=
          c10::str("<circle cx=\"", x, "\" cy=\"", y, "\" r=\"", kOfDot,
                   "\" fill=\"", colour_of(index), "\">", title, "</circle>");
    }
  }
  if (path.empty()) return dots;
  return c10::str("<path d=\"", path, "\" stroke=\"", colour_of(index), "\">",
                  title, "</path>", dots);
}

// The last value that is one.
std::string last_of(const Series& series) {
  const auto last = std::find_if(
      series.points.rbegin(), series.points.rend(),
      [](const auto& point) { return std::isfinite(point.second); });
  return last == series.points.rend() ? "" : short_number(last->second);
}

std::string caption(const Chart& chart) {
  std::string text = "<b>" + escaped(chart.title) + "</b>";
  if (!chart.unit.empty()) text += " (" + escaped(chart.unit) + ")";
  for (size_t i = 0; i < chart.series.size(); ++i) {
    const Series& series = chart.series[i];
    if (series.points.empty()) continue;
    text +=
        c10::str(" <span style=\"color:", colour_of(i), "\">&#9632;</span> ",
                 escaped(series.name), " <i>", last_of(series), "</i>");
  }
  return text;
}

}  // namespace

std::string svg(const Chart& chart) {
  Frame frame;
  for (const Series& series : chart.series) {
    for (const auto& [x, y] : series.points) {
      frame.x.take(x);
      frame.y.take(y);
    }
  }
  if (frame.y.empty()) return "";
  frame.x.widen();
  frame.y.widen(kLeastSpan);
  std::string text = c10::str("<figure><figcaption>", caption(chart),
                              "</figcaption>", "<svg viewBox=\"0 0 ", kWidth,
                              " ", kHeight, "\" role=\"img\">", axes(frame));
  for (double mark : chart.marks) {
    if (mark < frame.x.low || mark > frame.x.high) continue;
    text +=
        line(frame.px(mark), kTop, frame.px(mark), kHeight - kBottom, "mark");
  }
  for (size_t i = 0; i < chart.series.size(); ++i) {
    text += drawn(chart.series[i], frame, i);
  }
  return text + "</svg></figure>\n";
}

std::string colour_of(size_t n) {
  // First those of Okabe and Ito, which everybody tells apart.
  static constexpr std::array kColours = {
      "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
      "#8a8a8a", "#b8a800", "#7b5cd6", "#a0522d", "#2e8b57", "#d6336c"};
  return kColours[n % kColours.size()];
}

std::string escaped(const std::string& text) {
  std::string safe;
  for (char letter : text) {
    switch (letter) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      default:
        safe += letter;
    }
  }
  return safe;
}

std::string short_number(double value) {
  const double size = std::abs(value);
  if (size >= 1000 && size < 1e15) return with_commas(std::llround(value));
  std::array<char, 32> text{};
  const bool whole = value == std::floor(value) && size < 1000;
  std::snprintf(text.data(), text.size(), whole ? "%.0f" : "%.4g", value);
  return text.data();
}

}  // namespace tessera::monitor::report
