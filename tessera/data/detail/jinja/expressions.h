// Expressions of a template: tokens to functions.
//
// Filters, tests and methods that are not there are refused here, by name.
// Errors: Failure with the line.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tessera/data/detail/jinja/frame.h"
#include "tessera/data/detail/jinja/tokens.h"

namespace tessera::data::jinja {

inline Expression constant(Value value) {
  return [value = std::move(value)](Frame&) { return value; };
}

class Expressions {
 public:
  explicit Expressions(Tokens& tokens) : tokens_(tokens) {}

  // a, b or one expression. /* with_condition: `x if y` may stand there */
  Expression parse_tuple(bool with_condition = true);
  Expression parse(bool with_condition = true);
  // A filter behind a value: "|" was taken.
  Expression parse_filter(const Expression& value);
  // (a, b=c): empty where there is no "(".
  using ArgumentsOf = std::function<Arguments(Frame&)>;
  ArgumentsOf parse_arguments();

  // Names that are called as functions, with their lines.
  const std::vector<std::pair<std::string, int>>& called() const {
    return called_;
  }

 private:
  // Refuses a chain that is too long.
  void count(int terms) const;
  Expression parse_or();
  Expression parse_and();
  Expression parse_not();
  Expression parse_comparison();
  Expression parse_sum();
  Expression parse_concatenation();
  Expression parse_product();
  Expression parse_power();
  Expression parse_unary(bool with_filters = true);
  Expression parse_primary();
  Expression parse_name();
  Expression parse_postfix(Expression value);
  Expression parse_filters(Expression value);
  Expression parse_test(const Expression& value);
  Expression parse_subscript(const Expression& value);
  Expression parse_attribute(const Expression& value);
  Expression parse_list();
  Expression parse_dict();
  Expression call(const Expression& function);

  Tokens& tokens_;
  int depth_ = 0;
  std::vector<std::pair<std::string, int>> called_;
};

}  // namespace tessera::data::jinja
