// What ranks do, and when, as rows of boxes over time: as SVG without a script,
// and for a terminal.
//
// Colours: those of Okabe and Ito, which everybody tells apart; without colours
//          a letter tells the kind.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::monitor::report {

enum class BoxKind {
  kForward,
  kBackward,  // both parts at once
  kBackwardInput,
  kBackwardWeight,
  kRecompute,
  kCommunication,  // that is waited for
  kLoad,           // of samples
  kOther,          // losses, updates, what makes and frees memory
};

struct Box {
  double begin = 0, end = 0;
  BoxKind kind = BoxKind::kForward;
  int64_t microbatch = -1;  // -1: none
  int64_t chunk = 0;
};

// Boxes ascending, none over another. What lies between them is bubble.
struct Row {
  std::string label;
  std::vector<Box> boxes;
  std::string note;  // at its end
};

struct Panel {
  std::string title;
  std::vector<Row> rows;
};

// Panels lie below one another, all with the same time from left to right.
struct Drawing {
  std::string unit;  // of time
  std::vector<Panel> panels;
};

// A file of its own.
std::string svg_of(const Drawing& drawing);

// In so many columns, with escapes of a terminal where it has colours.
std::string text_of(const Drawing& drawing, int64_t columns, bool colours);

}  // namespace tessera::monitor::report
