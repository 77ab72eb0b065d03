// What stands behind a value: attributes, subscripts, calls, filters, tests.
#include <optional>

#include "tessera/data/detail/jinja/budget.h"
#include "tessera/data/detail/jinja/expressions.h"
#include "tessera/data/detail/jinja/filters.h"
#include "tessera/data/detail/jinja/methods.h"
#include "tessera/data/detail/jinja/operators.h"

namespace tessera::data::jinja {
namespace {

Value call_value(const Value& function, const Arguments& arguments) {
  use_steps(1);
  require_defined(function);
  if (function.callable() == nullptr) {
    throw Failure("'" + function.type_name() + "' cannot be called");
  }
  return function.callable()->call(arguments);
}

}  // namespace

Expression Expressions::parse_postfix(Expression value) {
  for (int parts = 0;; ++parts) {
    count(parts);
    if (tokens_.take_sign(".")) {
      value = parse_attribute(value);
    } else if (tokens_.take_sign("[")) {
      value = parse_subscript(value);
    } else if (tokens_.is_sign("(")) {
      value = call(value);
    } else {
      return value;
    }
  }
}

Expression Expressions::parse_attribute(const Expression& value) {
  if (tokens_.is(TokenKind::kInteger)) {
    const Value key = number_of<int64_t>(tokens_, tokens_.take().text);
    return [value, key](Frame& frame) { return element(value(frame), key); };
  }
  const int line = tokens_.peek().line;
  const std::string name = tokens_.expect_name();
  if (tokens_.is_sign("(") && !is_method(name)) {
    fail_at(line, "the method '" + name + "' is not supported");
  }
  return [value, name](Frame& frame) { return attribute(value(frame), name); };
}

Expression Expressions::parse_subscript(const Expression& value) {
  std::vector<Expression> parts;  // first, last, step
  int colons = 0;
  Expression part = constant(None{});
  while (!tokens_.is_sign("]")) {
    if (tokens_.take_sign(":")) {
      parts.push_back(std::exchange(part, constant(None{})));
      ++colons;
    } else {
      part = parse();
    }
  }
  tokens_.expect_sign("]");
  parts.push_back(part);
  if (colons == 0) {
    return [value, part](Frame& frame) {
      const Value of = value(frame);
      return element(of, part(frame));
    };
  }
  if (colons > 2) tokens_.fail("a slice has at most two ':'");
  parts.resize(3, constant(None{}));
  return [value, parts](Frame& frame) {
    const Value of = value(frame);
    return slice(of, parts[0](frame), parts[1](frame), parts[2](frame));
  };
}

Expressions::ArgumentsOf Expressions::parse_arguments() {
  std::vector<std::pair<std::string, Expression>> items;
  if (tokens_.take_sign("(")) {
    while (!tokens_.take_sign(")")) {
      if (!items.empty()) {
        tokens_.expect_sign(",");
        if (tokens_.take_sign(")")) break;
      }
      if (tokens_.is_sign("*") || tokens_.is_sign("**")) {
        fail_at(tokens_.peek().line, "arguments by '*' are not supported");
      }
      std::string name;
      if (tokens_.is_assignment()) {
        name = tokens_.expect_name();
        tokens_.expect_sign("=");
      }
      items.emplace_back(name, parse());
    }
  }
  return [items](Frame& frame) {
    Arguments arguments;
    for (const auto& [name, value] : items) {
      if (name.empty()) {
        arguments.positional.push_back(value(frame));
      } else {
        arguments.named.emplace_back(name, value(frame));
      }
    }
    return arguments;
  };
}

Expression Expressions::call(const Expression& function) {
  return [function, arguments = parse_arguments()](Frame& frame) {
    const Value called = function(frame);
    return call_value(called, arguments(frame));
  };
}

Expression Expressions::parse_filter(const Expression& value) {
  const int line = tokens_.peek().line;
  std::string name = tokens_.expect_name();
  while (tokens_.take_sign(".")) name += "." + tokens_.expect_name();
  const Filter filter = find_filter(name);
  if (filter == nullptr) {
    fail_at(line, "the filter '" + name + "' is not supported");
  }
  return [value, filter, arguments = parse_arguments()](Frame& frame) {
    use_steps(1);
    Value filtered = value(frame);
    Arguments given = arguments(frame);
    given.positional.insert(given.positional.begin(), std::move(filtered));
    return filter(given);
  };
}

Expression Expressions::parse_filters(Expression value) {
  for (int parts = 0;; ++parts) {
    count(parts);
    if (tokens_.take_sign("|")) {
      value = parse_filter(value);
    } else if (tokens_.take_word("is")) {
      value = parse_test(value);
    } else if (tokens_.is_sign("(")) {
      value = call(value);
    } else {
      return value;
    }
  }
}

Expression Expressions::parse_test(const Expression& value) {
  const bool negated = tokens_.take_word("not");
  const int line = tokens_.peek().line;
  const std::string name = tokens_.expect_name();
  const Test test = find_test(name);
  if (test == nullptr) {
    fail_at(line, "the test '" + name + "' is not supported");
  }
  ArgumentsOf arguments;
  const Token& next = tokens_.peek();
  const bool takes_one =
      next.kind == TokenKind::kString || next.kind == TokenKind::kInteger ||
      next.kind == TokenKind::kFloat || tokens_.is_sign("[") ||
      tokens_.is_sign("{") ||
      (next.kind == TokenKind::kName && next.text != "else" &&
       next.text != "or" && next.text != "and" && next.text != "is" &&
       next.text != "if" && next.text != "in" && next.text != "not");
  if (takes_one) {
    arguments = [one = parse_postfix(parse_primary())](Frame& frame) {
      return Arguments{{one(frame)}};
    };
  } else {
    arguments = parse_arguments();
  }
  return [value, test, arguments, negated](Frame& frame) -> Value {
    use_steps(1);
    const Value tested = value(frame);
    return test(tested, arguments(frame)) != negated;
  };
}

}  // namespace tessera::data::jinja
