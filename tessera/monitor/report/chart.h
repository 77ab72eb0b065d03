// A chart of lines as SVG: no script, no other file.
//
// Long series are drawn by their lowest and highest value in each pixel or so:
// no spike is lost. Values that are not finite break the line; a value alone is
// a dot.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera::monitor::report {

using Points = std::vector<std::pair<double, double>>;  // x ascending, y

struct Series {
  std::string name;
  Points points;
};

// A series without points takes no place, but has a colour: those after it keep
// theirs.
struct Chart {
  std::string title;
  std::string unit = "";  // "": none
  std::vector<Series> series;
  std::vector<double> marks = {};  // of x: thin vertical lines
};

// One <figure>; "" where no series has a finite value.
std::string svg(const Chart& chart);

// Of the n-th line, as CSS has it.
std::string colour_of(size_t n);

// `text` as HTML shows it.
std::string escaped(const std::string& text);

// 1.235e-05, 1.235, 12,345: four digits that count, or a whole number.
std::string short_number(double value);

}  // namespace tessera::monitor::report
