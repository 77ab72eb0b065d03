#include "tessera/monitor/report/drawing.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "tessera/core/units.h"
#include "tessera/monitor/report/chart.h"

namespace tessera::monitor::report {
namespace {

struct Look {
  const char* meaning;
  char letter;
  const char* fill;  // of an SVG
  const char* ink;
  int colour, ink_colour;  // of a terminal's 256
};

const Look& look_of(BoxKind kind) {
  static constexpr std::array kLooks = {
      Look{"forward", 'F', "#0072b2", "#fff", 25, 231},
      Look{"backward", 'B', "#d55e00", "#fff", 166, 231},
      Look{"gradient of inputs", 'I', "#e69f00", "#000", 214, 16},
      Look{"gradients of weights", 'W', "#009e73", "#fff", 36, 16},
      Look{"recomputation", 'R', "#56b4e9", "#000", 74, 16},
      Look{"waits for communication", 'C', "#cc79a7", "#000", 175, 16},
      Look{"loading of samples", 'L', "#f0e442", "#000", 227, 16},
      Look{"loss, update, memory", 'O', "#8a8a8a", "#fff", 245, 16},
  };
  return kLooks.at(static_cast<size_t>(kind));
}

double end_of(const Drawing& drawing) {
  double end = 0;
  for (const auto& panel : drawing.panels) {
    for (const auto& row : panel.rows) {
      if (!row.boxes.empty()) end = std::max(end, row.boxes.back().end);
    }
  }
  return end > 0 ? end : 1;
}

// What there is in the drawing, for its legend.
struct Shown {
  std::set<BoxKind> kinds;
  int64_t chunks = 1;
  size_t label = 0, note = 0;  // letters of the longest
};

Shown shown_in(const Drawing& drawing) {
  Shown shown;
  for (const auto& panel : drawing.panels) {
    for (const auto& row : panel.rows) {
      shown.label = std::max(shown.label, row.label.size());
      shown.note = std::max(shown.note, row.note.size());
      for (const auto& box : row.boxes) {
        shown.kinds.insert(box.kind);
        shown.chunks = std::max(shown.chunks, box.chunk + 1);
      }
    }
  }
  return shown;
}

// 1, 2 or 5 times a power of ten, for about ten steps.
double step_of_ticks(double end) {
  const double power = std::pow(10, std::floor(std::log10(end / 10)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power * 10 >= end) return factor * power;
  }
  return 10 * power;
}

std::string number(double value) { return fixed(value, 2); }

class Svg {
 public:
  explicit Svg(const Drawing& drawing)
      : drawing_(drawing),
        shown_(shown_in(drawing)),
        end_(end_of(drawing)),
        left_(kLetter * static_cast<double>(shown_.label) + 16),
        width_(left_ + kPlot + kLetter * static_cast<double>(shown_.note) +
               20) {}

  std::string run() {
    legend();
    for (const auto& panel : drawing_.panels) draw(panel);
    axis();
    const double height = y_ + 34;
    return c10::str("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ",
                    number(width_), " ", number(height), "\" width=\"",
                    number(width_),
                    "\" font-family=\"sans-serif\" font-size=\"12\">\n"
                    "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
                    body_, "</svg>\n");
  }

 private:
  static constexpr double kPlot = 960, kRow = 22, kBox = 18;
  static constexpr double kLetter = 6.6;    // wide, of labels
  static constexpr double kOfNumber = 6.2;  // of a digit in a box
  static constexpr double kFoot = 3;        // of a chunk behind the first

  double x(double time) const { return left_ + time / end_ * kPlot; }

  void text(double at, double y, const std::string& words,
            const std::string& more = "") {
    body_ += c10::str("<text x=\"", number(at), "\" y=\"", number(y), "\"",
                      more, ">", escaped(words), "</text>\n");
  }

  void rect(double at, double y, double width, double height,
            const std::string& fill, const std::string& inside = "") {
    body_ += c10::str("<rect x=\"", number(at), "\" y=\"", number(y),
                      "\" width=\"", number(width), "\" height=\"",
                      number(height), "\" fill=\"", fill, "\"",
                      inside.empty() ? "/>" : ">" + inside + "</rect>", "\n");
  }

  void legend() {
    double at = left_;
    for (BoxKind kind : shown_.kinds) {
      const Look& look = look_of(kind);
      rect(at, y_ - 10, 12, 12, look.fill);
      text(at + 16, y_, look.meaning);
      at +=
          30 + kLetter * static_cast<double>(std::string(look.meaning).size());
    }
    if (shown_.chunks > 1) {
      rect(at, y_ - 10, 12, 12, "#ddd");
      rect(at, y_ + 2 - kFoot, 12, kFoot, "#000");
      text(at + 16, y_,
           shown_.chunks == 2 ? "second chunk" : "a foot for each chunk below");
    }
    y_ += 14;
  }

  void draw(const Panel& panel) {
    y_ += 16;
    text(left_, y_, panel.title, " font-weight=\"bold\"");
    y_ += 8;
    for (const auto& row : panel.rows) {
      text(left_ - 8, y_ + 14, row.label, " text-anchor=\"end\"");
      rect(left_, y_, kPlot, kBox, "#f2f2f2");
      for (const auto& box : row.boxes) draw(box);
      text(left_ + kPlot + 8, y_ + 14, row.note);
      y_ += kRow;
    }
  }

  void draw(const Box& box) {
    const Look& look = look_of(box.kind);
    const double begin = x(box.begin), width = x(box.end) - begin;
    // A line of the ground between neighbours, where there is room.
    const double gap = width > 3 ? 0.8 : 0;
    rect(begin, y_, width - gap, kBox, look.fill,
         "<title>" + escaped(title_of(box)) + "</title>");
    const double foot =
        std::min(kFoot * static_cast<double>(box.chunk), kBox / 2);
    if (foot > 0) rect(begin, y_ + kBox - foot, width - gap, foot, "#000");
    const std::string name =
        box.microbatch < 0 ? "" : std::to_string(box.microbatch);
    if (name.empty() ||
        kOfNumber * static_cast<double>(name.size()) + 2 > width) {
      return;
    }
    text(begin + (width - gap) / 2, y_ + 13 - foot / 2, name,
         c10::str(" text-anchor=\"middle\" font-size=\"11\" fill=\"", look.ink,
                  "\""));
  }

  std::string title_of(const Box& box) const {
    std::string words = look_of(box.kind).meaning;
    if (box.microbatch >= 0) {
      words += c10::str(" of micro-batch ", box.microbatch);
    }
    if (shown_.chunks > 1) words += c10::str(", chunk ", box.chunk);
    return c10::str(words, ": ", short_number(box.begin), " to ",
                    short_number(box.end), " ", drawing_.unit);
  }

  void axis() {
    y_ += 4;
    const double step = step_of_ticks(end_);
    const auto count = static_cast<int64_t>(std::floor(end_ / step + 1e-9));
    for (int64_t i = 0; i <= count; ++i) {
      const double time = step * static_cast<double>(i);
      rect(x(time), y_, 1, 5, "#888");
      text(x(time), y_ + 18, short_number(time), " text-anchor=\"middle\"");
    }
    text(left_ + kPlot + 8, y_ + 18, drawing_.unit);
  }

  const Drawing& drawing_;
  const Shown shown_;
  const double end_, left_, width_;
  double y_ = 20;
  std::string body_;
};

class Terminal {
 public:
  Terminal(const Drawing& drawing, int64_t columns, bool colours)
      : drawing_(drawing),
        shown_(shown_in(drawing)),
        end_(end_of(drawing)),
        colours_(colours) {
    const auto beside = static_cast<int64_t>(shown_.label + shown_.note) + 4;
    plot_ = std::max<int64_t>(20, columns - beside);
  }

  std::string run() {
    std::string text;
    for (const auto& panel : drawing_.panels) {
      text += panel.title + "\n";
      for (const auto& row : panel.rows) text += line_of(row) + "\n";
    }
    return text + legend();
  }

 private:
  std::string line_of(const Row& row) const {
    std::string line = row.label;
    line.resize(shown_.label, ' ');
    line += " |";
    int64_t at = 0;
    for (const auto& box : row.boxes) {
      const int64_t begin = std::max(at, column(box.begin));
      const int64_t end = column(box.end);
      if (end <= begin) continue;
      line += std::string(begin - at, colours_ ? ' ' : '.');
      line += cells(box, end - begin);
      at = end;
    }
    line += std::string(plot_ - at, colours_ ? ' ' : '.');
    return line + "| " + row.note;
  }

  int64_t column(double time) const {
    return std::llround(time / end_ * static_cast<double>(plot_));
  }

  // A letter, or a colour, and as much of the number as there is room for.
  std::string cells(const Box& box, int64_t width) const {
    const Look& look = look_of(box.kind);
    std::string text = box.microbatch < 0 ? "" : std::to_string(box.microbatch);
    if (!colours_) {
      text = letter_of(box) + text;
      if (std::ssize(text) > width) text = letter_of(box);
      text.resize(width, '-');
      return text;
    }
    if (std::ssize(text) > width) text.clear();
    text.resize(width, ' ');
    return c10::str("\x1b[48;5;", look.colour, ";38;5;", look.ink_colour,
                    box.chunk % 2 == 1 ? ";4m" : "m", text, "\x1b[0m");
  }

  static std::string letter_of(const Box& box) {
    const char letter = look_of(box.kind).letter;
    const bool small = box.chunk % 2 == 1;
    return {static_cast<char>(small ? letter - 'A' + 'a' : letter)};
  }

  std::string legend() const {
    std::string text;
    for (BoxKind kind : shown_.kinds) {
      const Box sample{.kind = kind};
      text += (text.empty() ? "" : "  ") + cells(sample, 1) + " " +
              look_of(kind).meaning;
    }
    if (shown_.chunks > 1) {
      text += colours_ ? "  underlined: every second chunk"
                       : "  small letters: every second chunk";
    }
    if (text.empty()) return "\n";
    return text + (colours_ ? "\nnumbers: micro-batches  blank: bubble\n"
                            : "\ndigits: micro-batch  -: the same goes on  .: "
                              "bubble\n");
  }

  const Drawing& drawing_;
  const Shown shown_;
  const double end_;
  const bool colours_;
  int64_t plot_ = 0;
};

}  // namespace

std::string svg_of(const Drawing& drawing) { return Svg(drawing).run(); }

std::string text_of(const Drawing& drawing, int64_t columns, bool colours) {
  return Terminal(drawing, columns, colours).run();
}

}  // namespace tessera::monitor::report
