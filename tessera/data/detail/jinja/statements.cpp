#include "tessera/data/detail/jinja/statements.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>

#include "tessera/data/detail/jinja/budget.h"
#include "tessera/data/detail/jinja/filters.h"
#include "tessera/data/detail/jinja/operators.h"

namespace tessera::data::jinja {
namespace {

constexpr int kDeepest = 100;  // tags in tags, and macros that call each other

std::string rendered(const Statement& body, Frame& frame) {
  std::string text;
  body(frame, text);
  return text;
}

// On the page: what is written is made there once more.
void write(std::string& out, const std::string& text) {
  use_bytes(std::ssize(text));
  out += text;
}

// The loop's variable for item i.
Value loop_at(const std::vector<Value>& items, size_t i) {
  const auto size = static_cast<int64_t>(items.size());
  const auto at = static_cast<int64_t>(i);
  auto loop = std::make_shared<Namespace>();
  loop->is_loop = true;
  auto& names = loop->attributes.items;
  // Made once: a loop's body may be shorter than they are.
  thread_local const std::array<Value, 11> keys = {
      "index",  "index0", "revindex", "revindex0", "first",   "last",
      "length", "depth",  "depth0",   "previtem",  "nextitem"};
  // Depths count recursion, and no loop here recurs.
  const std::array<Value, 9> values = {at + 1,        at,      size - at,
                                       size - at - 1, at == 0, at + 1 == size,
                                       size,          1,       0};
  names.reserve(keys.size());
  for (size_t key = 0; key < values.size(); ++key) {
    names.emplace_back(keys[key], values[key]);
  }
  const Value none = Undefined{"there is no such item of the loop"};
  int& around = loop->attributes.depth;
  names.emplace_back(keys[9], i > 0 ? items[i - 1] : none);
  names.emplace_back(keys[10], at + 1 < size ? items[i + 1] : none);
  for (const size_t key : {9, 10}) {
    around = depth_around(names[key].second, around);
  }
  return loop;
}

// A macro, or what a {% call %} hands to one.
Value make_macro(const std::string& name, const std::vector<std::string>& names,
                 const std::vector<Expression>& defaults, const Statement& body,
                 Frame& defined_in) {
  defined_in.rendering.keep_frames();
  const auto run = [=, &defined_in](const Arguments& given) -> Value {
    Rendering& rendering = defined_in.rendering;
    if (++rendering.depth > kDeepest) {
      throw Failure("the macro '" + name + "' calls itself too often");
    }
    Scope scope(defined_in);
    Frame& frame = scope.frame();
    if (given.positional.size() > names.size()) {
      throw Failure(c10::str("the macro '", name, "' takes ", names.size(),
                             " arguments, not ", given.positional.size()));
    }
    for (size_t i = 0; i < given.positional.size(); ++i) {
      frame.set(names[i], given.positional[i]);
    }
    for (const auto& [key, value] : given.named) {
      const bool known =
          key == "caller" ||
          std::find(names.begin(), names.end(), key) != names.end();
      if (!known) {
        throw Failure("the macro '" + name + "' has no argument '" + key + "'");
      }
      frame.set(key, value);
    }
    for (size_t i = 0; i < names.size(); ++i) {
      const auto is_name = [&](const auto& item) {
        return item.first == names[i];
      };
      if (std::any_of(frame.names.begin(), frame.names.end(), is_name))
        continue;
      const Value missing = Undefined{"'" + names[i] + "' was not given"};
      frame.set(names[i], defaults[i] ? defaults[i](frame) : missing);
    }
    std::string text = rendered(body, frame);
    --rendering.depth;
    return text;
  };
  return Callable{name, run};
}

}  // namespace

Statement Statements::parse(const std::set<std::string>& functions) {
  Statement body = parse_until({});
  for (const auto& [name, line] : expressions_.called()) {
    if (!functions.contains(name) && !bound_.contains(name)) {
      fail_at(line, "the function '" + name + "' is not supported");
    }
  }
  return body;
}

Statement Statements::parse_until(const std::vector<std::string>& ends,
                                  std::string* end) {
  if (++depth_ > kDeepest) tokens_.fail("tags are nested too deeply");
  std::vector<Statement> parts;
  while (!ends.empty() || !tokens_.is(TokenKind::kEndOfFile)) {
    if (tokens_.is(TokenKind::kEndOfFile)) {
      tokens_.fail("'" + ends.back() + "' is missing");
    }
    if (tokens_.is(TokenKind::kData)) {
      parts.emplace_back(
          [text = tokens_.take().text](Frame&, std::string& out) {
            write(out, text);
            return Flow::kNext;
          });
    } else if (tokens_.is(TokenKind::kPrint)) {
      parts.push_back(parse_print());
    } else {
      const int line = tokens_.peek().line;
      tokens_.expect(TokenKind::kBegin, "a tag");
      const std::string name = tokens_.expect_name();
      if (std::find(ends.begin(), ends.end(), name) != ends.end()) {
        if (end != nullptr) *end = name;
        break;
      }
      parts.emplace_back(
          [line, run = parse_tag(name)](Frame& frame, std::string& out) {
            frame.rendering.line = line;
            return run(frame, out);
          });
    }
  }
  --depth_;
  return [parts](Frame& frame, std::string& out) {
    for (const Statement& part : parts) {
      use_steps(1);
      const Flow flow = part(frame, out);
      if (flow != Flow::kNext) return flow;
    }
    return Flow::kNext;
  };
}

Statement Statements::parse_body(const std::string& end) {
  end_tag();
  Statement body = parse_until({end});
  end_tag();
  return body;
}

Statement Statements::parse_print() {
  const int line = tokens_.take().line;
  Expression value = expressions_.parse_tuple();
  tokens_.expect(TokenKind::kPrintEnd, "'}}'");
  return [line, value](Frame& frame, std::string& out) {
    frame.rendering.line = line;
    write(out, value(frame).str());
    return Flow::kNext;
  };
}

Statement Statements::parse_tag(const std::string& name) {
  if (name == "if") return parse_if();
  if (name == "for") return parse_for();
  if (name == "set") return parse_set();
  if (name == "macro") return parse_macro();
  if (name == "call") return parse_call();
  if (name == "filter") return parse_filter();
  if (name == "with") return parse_with();
  if (name == "generation") return parse_generation();
  if (name == "break" || name == "continue") {
    end_tag();
    const Flow flow = name == "break" ? Flow::kBreak : Flow::kContinue;
    return [flow](Frame&, std::string&) { return flow; };
  }
  tokens_.fail("the tag '" + name + "' is not supported");
}

Statement Statements::parse_if() {
  std::vector<std::pair<Expression, Statement>> branches;
  Statement otherwise;
  std::string end = "if";
  while (end != "endif") {
    if (end == "else") {
      otherwise = parse_body("endif");
      break;
    }
    Expression condition = expressions_.parse_tuple(/*with_condition=*/false);
    end_tag();
    Statement body = parse_until({"elif", "else", "endif"}, &end);
    branches.emplace_back(std::move(condition), std::move(body));
    if (end == "endif") end_tag();
  }
  return [branches, otherwise](Frame& frame, std::string& out) {
    for (const auto& [condition, body] : branches) {
      if (condition(frame).truth()) return body(frame, out);
    }
    return otherwise ? otherwise(frame, out) : Flow::kNext;
  };
}

Statement Statements::parse_for() {
  const Target target = parse_target();
  tokens_.expect_word("in");
  const Expression list = expressions_.parse_tuple(/*with_condition=*/false);
  Expression condition;
  if (tokens_.take_word("if")) condition = expressions_.parse();
  if (tokens_.is_word("recursive")) {
    tokens_.fail("a recursive loop is not supported");
  }
  end_tag();
  std::string end;
  const Statement body = parse_until({"else", "endfor"}, &end);
  Statement otherwise;
  if (end == "else") {
    otherwise = parse_body("endfor");
  } else {
    end_tag();
  }
  return [=](Frame& frame, std::string& out) {
    const Value over = list(frame);
    std::vector<Value> own;
    if (condition || !over.sequence()) own = items_of(over);
    if (condition) {
      std::erase_if(own, [&](const Value& item) {
        Scope inner(frame);
        target(inner.frame(), item);
        return !condition(inner.frame()).truth();
      });
    }
    const bool is_own = condition || !over.sequence();
    const std::vector<Value>& items = is_own ? own : over.sequence()->items;
    for (size_t i = 0; i < items.size(); ++i) {
      Scope inner(frame);
      inner.frame().set("loop", loop_at(items, i));
      target(inner.frame(), items[i]);
      if (body(inner.frame(), out) == Flow::kBreak) break;
    }
    if (items.empty() && otherwise) otherwise(Scope(frame).frame(), out);
    return Flow::kNext;
  };
}

Statements::Target Statements::parse_target() {
  std::vector<Target> targets;
  bool comma = false;
  const bool bracket = tokens_.take_sign("(");
  do {
    const std::string name = tokens_.expect_name();
    if (tokens_.take_sign(".")) {
      const std::string attribute = tokens_.expect_name();
      targets.emplace_back([name, attribute](Frame& frame, const Value& value) {
        const Value* space = frame.find(name);
        if (space == nullptr || space->name_space() == nullptr ||
            space->name_space()->is_loop) {
          throw Failure("'" + name + "' is no namespace");
        }
        space->name_space()->attributes.set(attribute, value);
      });
    } else {
      bind_name(name);
      targets.emplace_back(
          [name](Frame& frame, const Value& value) { frame.set(name, value); });
    }
    comma = tokens_.take_sign(",");
  } while (comma && tokens_.is(TokenKind::kName) && !tokens_.is_word("in"));
  if (bracket) tokens_.expect_sign(")");
  if (targets.size() == 1 && !comma) return targets[0];
  return [targets](Frame& frame, const Value& value) {
    const std::vector<Value> items = items_of(value);
    if (items.size() != targets.size()) {
      throw Failure(
          c10::str(items.size(), " values for ", targets.size(), " names"));
    }
    for (size_t i = 0; i < items.size(); ++i) targets[i](frame, items[i]);
  };
}

Statement Statements::parse_set() {
  const Target target = parse_target();
  if (tokens_.take_sign("=")) {
    const Expression value = expressions_.parse_tuple();
    end_tag();
    return [target, value](Frame& frame, std::string&) {
      target(frame, value(frame));
      return Flow::kNext;
    };
  }
  Expression value = [](Frame& frame) { return *frame.find(""); };
  while (tokens_.take_sign("|")) value = expressions_.parse_filter(value);
  const Statement body = parse_body("endset");
  return [=](Frame& frame, std::string&) {
    Scope inner(frame);
    inner.frame().set("", rendered(body, inner.frame()));
    target(frame, value(inner.frame()));
    return Flow::kNext;
  };
}

Statements::Parameters Statements::parse_parameters() {
  Parameters parameters;
  tokens_.expect_sign("(");
  while (!tokens_.take_sign(")")) {
    if (!parameters.names.empty()) tokens_.expect_sign(",");
    parameters.names.push_back(tokens_.expect_name());
    bind_name(parameters.names.back());
    const bool has_default = tokens_.take_sign("=");
    parameters.defaults.push_back(has_default ? expressions_.parse() : nullptr);
  }
  return parameters;
}

Statement Statements::parse_macro() {
  const std::string name = tokens_.expect_name();
  bind_name(name);
  bind_name("caller");
  const Parameters parameters = parse_parameters();
  const Statement body = parse_body("endmacro");
  return [=](Frame& frame, std::string&) {
    frame.set(name, make_macro(name, parameters.names, parameters.defaults,
                               body, frame));
    return Flow::kNext;
  };
}

Statement Statements::parse_call() {
  Parameters parameters;
  if (tokens_.is_sign("(")) parameters = parse_parameters();
  const int line = tokens_.peek().line;
  const std::string name = tokens_.expect_name();
  if (!bound_.contains(name)) {
    fail_at(line, "the macro '" + name + "' of a 'call' is not there");
  }
  const auto arguments = expressions_.parse_arguments();
  const Statement body = parse_body("endcall");
  return [=](Frame& frame, std::string& out) {
    const Value* macro = frame.find(name);
    if (macro == nullptr || macro->callable() == nullptr) {
      throw Failure("'" + name + "' is no macro");
    }
    Arguments given = arguments(frame);
    given.named.emplace_back(
        "caller", make_macro("caller", parameters.names, parameters.defaults,
                             body, frame));
    write(out, macro->callable()->call(given).str());
    return Flow::kNext;
  };
}

Statement Statements::parse_filter() {
  Expression value = [](Frame& frame) { return *frame.find(""); };
  do {
    value = expressions_.parse_filter(value);
  } while (tokens_.take_sign("|"));
  const Statement body = parse_body("endfilter");
  return [=](Frame& frame, std::string& out) {
    Scope inner(frame);
    inner.frame().set("", rendered(body, inner.frame()));
    write(out, value(inner.frame()).str());
    return Flow::kNext;
  };
}

Statement Statements::parse_with() {
  std::vector<std::pair<Target, Expression>> names;
  while (!tokens_.is(TokenKind::kEnd)) {
    if (!names.empty()) tokens_.expect_sign(",");
    Target target = parse_target();
    tokens_.expect_sign("=");
    names.emplace_back(std::move(target), expressions_.parse());
  }
  const Statement body = parse_body("endwith");
  return [=](Frame& frame, std::string& out) {
    Scope inner(frame);
    for (const auto& [target, value] : names) {
      target(inner.frame(), value(frame));
    }
    return body(inner.frame(), out);
  };
}

// What the assistant writes: its place in the text is kept.
Statement Statements::parse_generation() {
  marks_answers_ = true;
  const Statement body = parse_body("endgeneration");
  return [=](Frame& frame, std::string& out) {
    const size_t start = frame.rendering.output.size();
    const std::string text = rendered(body, Scope(frame).frame());
    frame.rendering.answers.emplace_back(start, start + text.size());
    write(out, text);
    return Flow::kNext;
  };
}

}  // namespace tessera::data::jinja
