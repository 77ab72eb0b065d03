#include "tessera/benchmark/plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "tessera/comm/verb.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/monitor/report/chart.h"

namespace tessera::benchmark {
namespace {

constexpr double kPanelWidth = 380, kPanelHeight = 270;
constexpr double kLeft = 52, kTop = 30, kRight = 14, kBottom = 34;
constexpr double kTitle = 28, kLegend = 22;
constexpr size_t kMostColumns = 3;

using Point = std::pair<double, double>;
using Panel = std::map<std::string, std::vector<Point>>;  // by line

template <typename... Args>
std::string format(const char* pattern, Args... args) {
  std::array<char, 512> text{};
  std::snprintf(text.data(), text.size(), pattern, args...);
  return text.data();
}

// Whole powers of `base` around all values: a logarithmic axis.
struct Axis {
  double base = 10;
  int first = std::numeric_limits<int>::max();
  int last = std::numeric_limits<int>::min();

  void include(double value) {
    const double power = std::log(value) / std::log(base);
    first = std::min(first, static_cast<int>(std::floor(power + 1e-9)));
    last =
        std::max({last, static_cast<int>(std::ceil(power - 1e-9)), first + 1});
  }
  // 0 at the first power, 1 at the last.
  double at(double value) const {
    return (std::log(value) / std::log(base) - first) / (last - first);
  }
};

struct Drawing {
  std::vector<std::pair<std::string, Panel>> panels;  // by operation
  std::vector<std::string> lines;                     // of the legend
  Axis sizes{.base = 2}, values{.base = 10};

  std::string colour_of(const std::string& line) const {
    const auto found = std::find(lines.begin(), lines.end(), line);
    return monitor::report::colour_of(found - lines.begin());
  }
};

bool differ(const std::vector<Row>& rows, auto member) {
  return std::any_of(rows.begin(), rows.end(), [&](const Row& row) {
    return member(row.what) != member(rows.front().what);
  });
}

Drawing drawing_of(const std::vector<Row>& rows, Plotted what) {
  Drawing drawing;
  const bool dtypes = differ(rows, [](const Case& c) { return c.dtype; });
  const bool redops = differ(rows, [](const Case& c) { return c.redop; });
  for (const Row& row : rows) {
    if (row.what.operation == Operation::kBarrier) continue;
    const std::string name = name_of(row.what.operation);
    if (drawing.panels.empty() || drawing.panels.back().first != name) {
      drawing.panels.emplace_back(name, Panel());
    }
    for (const Cell& cell : row.cells) {
      std::string line = cell.series.name();
      if (dtypes) line += std::string(" ") + name_of(row.what.dtype);
      if (redops) line += std::string(" ") + name_of(row.what.redop);
      const double value =
          what == Plotted::kTime ? cell.time_us : row.busbw(cell);
      const auto size = static_cast<double>(row.bytes);
      if (value <= 0 || size <= 0) continue;  // a world of one moves nothing
      if (std::find(drawing.lines.begin(), drawing.lines.end(), line) ==
          drawing.lines.end()) {
        drawing.lines.push_back(line);
      }
      drawing.panels.back().second[line].emplace_back(size, value);
      drawing.sizes.include(size);
      drawing.values.include(value);
    }
  }
  return drawing;
}

std::string text_at(double x, double y, const char* anchor,
                    const std::string& text) {
  return format("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y,
                anchor) +
         monitor::report::escaped(text) + "</text>\n";
}

// "4K", "1M": the axis has no room for units.
std::string short_bytes(double bytes) {
  const std::array kUnits = {"", "K", "M", "G", "T"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < kUnits.size(); ++unit) bytes /= 1024;
  return format("%.0f%s", bytes, kUnits[unit]);
}

// One panel with its upper left corner at (0, 0).
class PanelText {
 public:
  explicit PanelText(const Drawing& drawing) : drawing_(drawing) {}

  std::string of(const std::string& name, const Panel& panel) const {
    std::string text = text_at(kLeft, kTop - 10, "start", name) + grid();
    for (const auto& [line, points] : panel) {
      text += curve(drawing_.colour_of(line), points);
    }
    return text;
  }

 private:
  double x(double size) const {
    return kLeft + (kPanelWidth - kLeft - kRight) * drawing_.sizes.at(size);
  }
  double y(double value) const {
    return kPanelHeight - kBottom -
           (kPanelHeight - kTop - kBottom) * drawing_.values.at(value);
  }

  std::string grid() const {
    std::string text;
    const Axis& sizes = drawing_.sizes;
    const Axis& values = drawing_.values;
    for (int power = values.first; power <= values.last; ++power) {
      const double value = std::pow(values.base, power);
      text += format("<path d=\"M%.1f %.1fH%.1f\" stroke=\"#ddd\"/>\n", kLeft,
                     y(value), kPanelWidth - kRight);
      text += text_at(kLeft - 6, y(value) + 4, "end", format("%g", value));
    }
    const int step = std::max(1, (sizes.last - sizes.first + 5) / 6);
    for (int power = sizes.first; power <= sizes.last; power += step) {
      const double size = std::pow(sizes.base, power);
      text += format("<path d=\"M%.1f %.1fV%.1f\" stroke=\"#eee\"/>\n", x(size),
                     kTop, kPanelHeight - kBottom);
      text += text_at(x(size), kPanelHeight - kBottom + 16, "middle",
                      short_bytes(size));
    }
    return text;
  }

  std::string curve(const std::string& colour,
                    const std::vector<Point>& points) const {
    std::string corners, dots;
    for (const auto& [size, value] : points) {
      corners += format(corners.empty() ? "%.1f,%.1f" : " %.1f,%.1f", x(size),
                        y(value));
      dots +=
          format("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.5\" fill=\"%s\"/>\n",
                 x(size), y(value), colour.c_str());
    }
    return "<polyline points=\"" + corners + "\" fill=\"none\" stroke=\"" +
           colour + "\" stroke-width=\"1.5\"/>\n" + dots;
  }

  const Drawing& drawing_;
};

std::string legend(const Drawing& drawing, double y) {
  std::string text;
  double x = kLeft;
  for (const std::string& line : drawing.lines) {
    text += format(
        "<path d=\"M%.1f %.1fh18\" stroke=\"%s\" "
        "stroke-width=\"3\"/>\n",
        x, y - 4, drawing.colour_of(line).c_str());
    text += text_at(x + 24, y, "start", line);
    x += 44 + 7 * static_cast<double>(line.size());
  }
  return text;
}

}  // namespace

std::string plot(const std::vector<Row>& rows, Plotted what,
                 const std::string& title) {
  const Drawing drawing = drawing_of(rows, what);
  const size_t panels = std::max<size_t>(1, drawing.panels.size());
  const size_t columns = std::min(kMostColumns, panels);
  const size_t lines = (panels + columns - 1) / columns;
  const double width = kPanelWidth * static_cast<double>(columns);
  const double height =
      kTitle + kPanelHeight * static_cast<double>(lines) + kLegend;
  const std::string unit =
      what == Plotted::kTime ? "time (us)" : "busbw (GB/s)";
  std::string text = format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"%.0f\" height=\"%.0f\" fill=\"white\"/>\n",
      width, height, width, height);
  text += text_at(kLeft, 18, "start", title + ": " + unit + " by size (bytes)");
  const PanelText panel_text(drawing);
  for (size_t i = 0; i < drawing.panels.size(); ++i) {
    const size_t line = i / columns, column = i % columns;
    text += format("<g transform=\"translate(%.0f %.0f)\">\n",
                   kPanelWidth * static_cast<double>(column),
                   kTitle + kPanelHeight * static_cast<double>(line));
    text += panel_text.of(drawing.panels[i].first, drawing.panels[i].second);
    text += "</g>\n";
  }
  return text + legend(drawing, height - 8) + "</svg>\n";
}

}  // namespace tessera::benchmark
