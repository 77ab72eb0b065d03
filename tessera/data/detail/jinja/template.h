// A template of a chat: the part of Jinja2 that Hugging Face's templates use,
// in the sandbox and with the settings that transformers gives them.
//
// There are: expressions with filters, tests, slices, conditions and methods of
// text, lists and dicts; if, for (loop.*, break, continue), set (blocks and
// namespaces too), macro, call, filter, with, raw, generation; range, dict,
// namespace, raise_exception, strftime_now; control of white space.
// There are not: include, import, extends, block, autoescape, recursive loops,
// what changes a list or dict in place.
// Errors: Failure with the line: at parsing for what is not supported, by name;
//         at rendering for what goes wrong with these values, and where it
//         would use more than its limits.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/data/detail/jinja/budget.h"
#include "tessera/data/detail/jinja/frame.h"

namespace tessera::data::jinja {

struct Rendered {
  std::string text;
  // Bytes [first, second) that {% generation %} marks.
  std::vector<std::pair<size_t, size_t>> answers;
};

class Template {
 public:
  explicit Template(std::string_view source);
  Rendered render(const Dict& variables, const Limits& limits = {}) const;
  bool marks_answers() const { return marks_answers_; }

 private:
  Statement body_;
  bool marks_answers_ = false;
};

}  // namespace tessera::data::jinja
