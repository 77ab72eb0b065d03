#include "tessera/monitor/report/chart.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>

#include "tessera/monitor/console.h"

namespace tessera::monitor::report {
namespace {

// Of the drawing, in its own units.
constexpr double kWidth = 560, kHeight = 230;
constexpr double kLeft = 62, kRight = 12, kTop = 10, kBottom = 26;
constexpr int kBuckets = 480;  // of x, about a pixel each
constexpr int kTicksOfY = 5;   // about

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();

  void take(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
  // So that a constant has a place in the middle.
  void widen() {
    if (high > low) return;
    const double by = low == 0 ? 1 : std::abs(low) * 0.1;
    low -= by;
    high += by;
  }
};

// 1, 2 or 5 times a power of ten, for about `count` steps over the range.
double nice_step(const Range& range, int count) {
  const double rough = (range.high - range.low) / count;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

std::vector<double> ticks(const Range& range, int count, double finest = 0) {
  const double step = std::max(finest, nice_step(range, count));
  std::vector<double> all;
  const auto first = std::llround(std::ceil(range.low / step));
  const auto last = std::llround(std::floor(range.high / step + 1e-9));
  for (int64_t i = first; i <= last; ++i) {
    all.push_back(static_cast<double>(i) * step);
  }
  return all;
}

std::string number(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f", value);
  return text.data();
}

struct Frame {
  Range x, y;
  double px(double value) const {
    return kLeft +
           (value - x.low) / (x.high - x.low) * (kWidth - kLeft - kRight);
  }
  double py(double value) const {
    return kHeight - kBottom -
           (value - y.low) / (y.high - y.low) * (kHeight - kTop - kBottom);
  }
};

std::string line(double x1, double y1, double x2, double y2,
                 const std::string& kind) {
  return c10::str("<line class=\"", kind, "\" x1=\"", number(x1), "\" y1=\"",
                  number(y1), "\" x2=\"", number(x2), "\" y2=\"", number(y2),
                  "\"/>");
}

// With as many digits as tell neighbours apart.
std::string tick_text(double value, double step) {
  if (step >= 1 || step < 1e-5) return short_number(value);
  const int digits = static_cast<int>(-std::floor(std::log10(step) + 1e-9));
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

std::string axes(const Frame& frame) {
  std::string text;
  for (double y : ticks(frame.y, kTicksOfY)) {
    const double at = frame.py(y);
    text += line(kLeft, at, kWidth - kRight, at, "grid");
    text += c10::str("<text class=\"y\" x=\"", number(kLeft - 6), "\" y=\"",
                     number(at + 3.5), "\">",
                     tick_text(y, nice_step(frame.y, kTicksOfY)), "</text>");
  }
  for (double x : ticks(frame.x, 6, /*finest=*/1)) {  // steps are whole
    text += c10::str("<text class=\"x\" x=\"", number(frame.px(x)), "\" y=\"",
                     number(kHeight - 8), "\">", short_number(x), "</text>");
  }
  return text;
}

using Points = std::vector<std::pair<double, double>>;

// The lowest and the highest value of each bucket of x, in their order.
Points thinned(const Points& points, const Range& x) {
  if (points.size() <= 2 * size_t{kBuckets}) return points;
  Points kept;
  const auto bucket_of = [&](double at) {
    return static_cast<int>((at - x.low) / (x.high - x.low) * kBuckets);
  };
  for (size_t first = 0; first < points.size();) {
    size_t end = first, lowest = first, highest = first;
    const int bucket = bucket_of(points[first].first);
    for (; end < points.size() && bucket_of(points[end].first) == bucket;
         ++end) {
      if (points[end].second < points[lowest].second) lowest = end;
      if (points[end].second > points[highest].second) highest = end;
    }
    kept.push_back(points[std::min(lowest, highest)]);
    if (lowest != highest) kept.push_back(points[std::max(lowest, highest)]);
    first = end;
  }
  return kept;
}

std::string path_of(const Series& series, const Frame& frame, size_t index) {
  std::string path;
  bool draws = false;
  for (const auto& [x, y] : thinned(series.points, frame.x)) {
    if (!std::isfinite(y)) {
      draws = false;
      continue;
    }
    path += c10::str(draws ? "L" : "M", number(frame.px(x)), " ",
                     number(frame.py(y)));
    draws = true;
  }
  const std::string name = escaped(series.name);
  // A point alone shows as a dot, by its round end.
  if (series.points.size() == 1 && draws) path += "h0";
  return c10::str("<path d=\"", path, "\" stroke=\"", colour_of(index),
                  "\"><title>", name, "</title></path>");
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
  frame.y.widen();
  std::string text = c10::str("<figure><figcaption>", caption(chart),
                              "</figcaption>", "<svg viewBox=\"0 0 ", kWidth,
                              " ", kHeight, "\" role=\"img\">", axes(frame));
  for (double mark : chart.marks) {
    if (mark < frame.x.low || mark > frame.x.high) continue;
    text +=
        line(frame.px(mark), kTop, frame.px(mark), kHeight - kBottom, "mark");
  }
  for (size_t i = 0; i < chart.series.size(); ++i) {
    text += path_of(chart.series[i], frame, i);
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
