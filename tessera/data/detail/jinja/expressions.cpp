#include "tessera/data/detail/jinja/expressions.h"

#include <optional>

#include "tessera/data/detail/jinja/budget.h"
#include "tessera/data/detail/jinja/filters.h"
#include "tessera/data/detail/jinja/methods.h"
#include "tessera/data/detail/jinja/operators.h"

namespace tessera::data::jinja {
namespace {

// Brackets in brackets, and terms of one chain, each of which is a call inside
// of another: a template cannot use up the stack.
constexpr int kDeepest = 100;
constexpr int kLongest = 1000;

using Operator = Value (*)(const Value&, const Value&);

Expression binary(Expression left, Expression right, Operator apply) {
  return
      [left = std::move(left), right = std::move(right), apply](Frame& frame) {
        use_steps(1);
        const Value a = left(frame);
        return apply(a, right(frame));
      };
}

// The left one, where its truth ends the matter; else the right one.
Expression either(Expression left, Expression right, bool ends) {
  return
      [left = std::move(left), right = std::move(right), ends](Frame& frame) {
        Value value = left(frame);
        return value.truth() == ends ? value : right(frame);
      };
}

struct Depth {
  Depth(int& depth, const Tokens& tokens) : depth_(depth) {
    if (++depth_ > kDeepest) tokens.fail("brackets are nested too deeply");
  }
  ~Depth() { --depth_; }
  Depth(const Depth&) = delete;
  Depth& operator=(const Depth&) = delete;

 private:
  int& depth_;
};

}  // namespace

void Expressions::count(int terms) const {
  if (terms > kLongest) tokens_.fail("an expression has too many terms");
}

Expression Expressions::parse_tuple(bool with_condition) {
  std::vector<Expression> items;
  bool comma = false;
  while (!tokens_.is(TokenKind::kEnd) && !tokens_.is(TokenKind::kPrintEnd) &&
         !tokens_.is_sign(")") && !(comma && tokens_.is_word("in"))) {
    items.push_back(parse(with_condition));
    comma = tokens_.take_sign(",");
    if (!comma) break;
  }
  if (items.empty() && !tokens_.is_sign(")")) {
    tokens_.fail("an expression is expected");
  }
  if (items.size() == 1 && !comma) return items[0];
  return [items](Frame& frame) {
    std::vector<Value> values;
    for (const Expression& item : items) values.push_back(item(frame));
    return Value(std::move(values), /*tuple=*/true);
  };
}

Expression Expressions::parse(bool with_condition) {
  const Depth depth(depth_, tokens_);
  Expression value = parse_or();
  while (with_condition && tokens_.take_word("if")) {
    Expression condition = parse_or();
    Expression otherwise =
        constant(Undefined{"what an 'if' without 'else' leaves is undefined"});
    if (tokens_.take_word("else")) otherwise = parse();
    value = [value, condition, otherwise](Frame& frame) {
      return condition(frame).truth() ? value(frame) : otherwise(frame);
    };
  }
  return value;
}

Expression Expressions::parse_or() {
  Expression left = parse_and();
  for (int terms = 1; tokens_.take_word("or");) {
    count(++terms);
    left = either(std::move(left), parse_and(), /*ends=*/true);
  }
  return left;
}

Expression Expressions::parse_and() {
  Expression left = parse_not();
  for (int terms = 1; tokens_.take_word("and");) {
    count(++terms);
    left = either(std::move(left), parse_not(), /*ends=*/false);
  }
  return left;
}

Expression Expressions::parse_not() {
  if (!tokens_.take_word("not")) return parse_comparison();
  const Depth depth(depth_, tokens_);
  return [value = parse_not()](Frame& frame) -> Value {
    return !value(frame).truth();
  };
}

// a < b <= c holds where each pair does.
Expression Expressions::parse_comparison() {
  using Holds = bool (*)(const Value&, const Value&);
  static const std::vector<std::pair<std::string, Holds>> kSigns = {
      {"==", equal},
      {"!=", [](const Value& a, const Value& b) { return !equal(a, b); }},
      {"<", less},
      {"<=", [](const Value& a, const Value& b) { return !less(b, a); }},
      {">", [](const Value& a, const Value& b) { return less(b, a); }},
      {">=", [](const Value& a, const Value& b) { return !less(a, b); }},
  };
  const auto next = [&]() -> Holds {
    for (const auto& [sign, holds] : kSigns) {
      if (tokens_.take_sign(sign)) return holds;
    }
    if (tokens_.take_word("in")) {
      return [](const Value& a, const Value& b) { return contains(b, a); };
    }
    if (!tokens_.take_word("not")) return nullptr;
    tokens_.expect_word("in");
    return [](const Value& a, const Value& b) { return !contains(b, a); };
  };
  Expression first = parse_sum();
  std::vector<std::pair<Holds, Expression>> pairs;
  for (Holds holds = next(); holds != nullptr; holds = next()) {
    pairs.emplace_back(holds, parse_sum());
  }
  if (pairs.empty()) return first;
  return [first, pairs](Frame& frame) -> Value {
    Value left = first(frame);
    for (const auto& [holds, expression] : pairs) {
      Value right = expression(frame);
      if (!holds(left, right)) return false;
      left = std::move(right);
    }
    return true;
  };
}

Expression Expressions::parse_sum() {
  Expression left = parse_concatenation();
  for (int terms = 1;; ++terms) {
    count(terms);
    if (tokens_.take_sign("+")) {
      left = binary(std::move(left), parse_concatenation(), add);
    } else if (tokens_.take_sign("-")) {
      left = binary(std::move(left), parse_concatenation(), subtract);
    } else {
      return left;
    }
  }
}

Expression Expressions::parse_concatenation() {
  Expression left = parse_product();
  for (int terms = 1; tokens_.take_sign("~");) {
    count(++terms);
    left = binary(std::move(left), parse_product(), concatenate);
  }
  return left;
}

Expression Expressions::parse_product() {
  static const std::vector<std::pair<std::string, Operator>> kSigns = {
      {"*", multiply}, {"/", divide}, {"//", floor_divide}, {"%", modulo}};
  Expression left = parse_power();
  for (int terms = 1;; ++terms) {
    count(terms);
    Operator apply = nullptr;
    for (const auto& [sign, found] : kSigns) {
      if (apply == nullptr && tokens_.take_sign(sign)) apply = found;
    }
    if (apply == nullptr) return left;
    left = binary(std::move(left), parse_power(), apply);
  }
}

Expression Expressions::parse_power() {
  Expression left = parse_unary();
  for (int terms = 1; tokens_.take_sign("**");) {
    count(++terms);
    left = binary(std::move(left), parse_unary(), power);
  }
  return left;
}

Expression Expressions::parse_unary(bool with_filters) {
  const Depth depth(depth_, tokens_);
  Expression value;
  if (tokens_.take_sign("-")) {
    value = [of = parse_unary(false)](Frame& frame) {
      return negate(of(frame));
    };
  } else if (tokens_.take_sign("+")) {
    value = parse_unary(false);
  } else {
    value = parse_postfix(parse_primary());
  }
  return with_filters ? parse_filters(value) : value;
}

Expression Expressions::parse_primary() {
  const Token& token = tokens_.peek();
  switch (token.kind) {
    case TokenKind::kName:
      return parse_name();
    case TokenKind::kString: {
      std::string text;  // texts side by side are one
      while (tokens_.is(TokenKind::kString)) text += tokens_.take().text;
      return constant(text);
    }
    case TokenKind::kInteger:
      return constant(number_of<int64_t>(tokens_, tokens_.take().text));
    case TokenKind::kFloat:
      return constant(number_of<double>(tokens_, tokens_.take().text));
    default:
      break;
  }
  if (tokens_.take_sign("(")) {
    Expression value = parse_tuple();
    tokens_.expect_sign(")");
    return value;
  }
  if (tokens_.take_sign("[")) return parse_list();
  if (tokens_.take_sign("{")) return parse_dict();
  tokens_.fail("an expression is expected");
}

Expression Expressions::parse_name() {
  const Token& token = tokens_.take();
  const std::string name = token.text;
  if (name == "true" || name == "True") return constant(true);
  if (name == "false" || name == "False") return constant(false);
  if (name == "none" || name == "None") return constant(None{});
  if (tokens_.is_sign("(")) called_.emplace_back(name, token.line);
  return [name](Frame& frame) -> Value {
    const Value* found = frame.find(name);
    if (found != nullptr) return *found;
    return Undefined{"'" + name + "' is undefined"};
  };
}

Expression Expressions::parse_list() {
  std::vector<Expression> items;
  while (!tokens_.take_sign("]")) {
    if (!items.empty()) {
      tokens_.expect_sign(",");
      if (tokens_.take_sign("]")) break;
    }
    items.push_back(parse());
  }
  return [items](Frame& frame) -> Value {
    std::vector<Value> values;
    for (const Expression& item : items) values.push_back(item(frame));
    return values;
  };
}

Expression Expressions::parse_dict() {
  std::vector<std::pair<Expression, Expression>> items;
  while (!tokens_.take_sign("}")) {
    if (!items.empty()) {
      tokens_.expect_sign(",");
      if (tokens_.take_sign("}")) break;
    }
    Expression key = parse();
    tokens_.expect_sign(":");
    items.emplace_back(std::move(key), parse());
  }
  return [items](Frame& frame) -> Value {
    Dict dict;
    for (const auto& [key, value] : items) dict.set(key(frame), value(frame));
    return dict;
  };
}

}  // namespace tessera::data::jinja
