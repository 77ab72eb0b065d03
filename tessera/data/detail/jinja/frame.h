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

// One rendering.
struct Rendering {
  std::deque<Frame> frames = {};
  std::string output = {};  // of the template itself, not of a macro
  std::vector<std::pair<size_t, size_t>> answers = {};  // {% generation %}
  int line = 1;
  int depth = 0;           // of macros that call each other
  int64_t num_macros = 0;  // so far
  size_t num_kept = 0;     // of the frames, since a macro was made in them
  // Which may hold each other in a ring, or in a chain of any length.
  std::vector<std::shared_ptr<Namespace>> spaces = {};

  Rendering() = default;
  ~Rendering();
  Rendering(const Rendering&) = delete;
  Rendering& operator=(const Rendering&) = delete;
  // A macro is made: it may look into every frame there is.
  void keep_frames();
};

// A frame within `parent`, for as long as this lives; for longer where a macro
// was made meanwhile.
class Scope {
 public:
  explicit Scope(Frame& parent);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  Frame& frame() { return frame_; }

 private:
  Rendering& rendering_;
  int64_t num_macros_;
  Frame& frame_;
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
