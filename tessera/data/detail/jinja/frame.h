// What a template's parts are compiled to: functions of the names around them.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/data/detail/jinja/value.h"

namespace tessera::data::jinja {

struct Frame;

// One rendering. Frames live as long as it, since macros keep theirs.
struct Rendering {
  std::deque<Frame> frames = {};
  std::string output = {};  // of the template itself, not of a macro
  std::vector<std::pair<size_t, size_t>> answers = {};  // {% generation %}
  int line = 1;
  int depth = 0;  // of macros that call each other
  Frame& add(Frame* parent);
};

struct Frame {
  Rendering& rendering;
  Frame* parent = nullptr;
  std::vector<std::pair<std::string, Value>> names = {};

  const Value* find(const std::string& name) const;
  void set(const std::string& name, Value value);
};

enum class Flow { kNext, kBreak, kContinue };
using Expression = std::function<Value(Frame&)>;
using Statement = std::function<Flow(Frame&, std::string& out)>;

}  // namespace tessera::data::jinja
