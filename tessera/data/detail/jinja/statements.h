// Statements of a template: tokens to functions that write text.
//
// Tags, and functions that are called without being there, are refused by name.
// Errors: Failure with the line.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/detail/jinja/expressions.h"

namespace tessera::data::jinja {

class Statements {
 public:
  explicit Statements(Tokens& tokens) : tokens_(tokens), expressions_(tokens) {}

  // The whole template. `functions`: those that every template has.
  Statement parse(const std::set<std::string>& functions);
  // Whether {% generation %} marks what the assistant writes.
  bool marks_answers() const { return marks_answers_; }

 private:
  // Sets names of a frame from a value: x, or a, b, or space.x.
  using Target = std::function<void(Frame&, const Value&)>;
  struct Parameters {
    std::vector<std::string> names;
    std::vector<Expression> defaults;  // null: none
  };

  // Up to {% END %} for one of the ends, which is taken; its name in `end`.
  Statement parse_until(const std::vector<std::string>& ends,
                        std::string* end = nullptr);
  // The same, with nothing else in the end's tag.
  Statement parse_body(const std::string& end);
  Statement parse_tag(const std::string& name);
  Statement parse_print();
  Statement parse_if();
  Statement parse_for();
  Statement parse_set();
  Statement parse_macro();
  Statement parse_call();
  Statement parse_filter();
  Statement parse_with();
  Statement parse_generation();
  Target parse_target();
  Parameters parse_parameters();
  void end_tag() { tokens_.expect(TokenKind::kEnd, "'%}'"); }
  void bind_name(const std::string& name) { bound_.insert(name); }

  Tokens& tokens_;
  Expressions expressions_;
  std::set<std::string> bound_ = {};
  bool marks_answers_ = false;
  int depth_ = 0;
};

}  // namespace tessera::data::jinja
