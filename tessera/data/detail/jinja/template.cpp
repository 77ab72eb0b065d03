#include "tessera/data/detail/jinja/template.h"

#include <c10/util/StringUtil.h>

#include <array>
#include <ctime>
#include <set>

#include "tessera/data/detail/jinja/operators.h"
#include "tessera/data/detail/jinja/statements.h"

namespace tessera::data::jinja {
namespace {

constexpr int64_t kLongestRange = 100'000;  // as in Jinja2's sandbox

Value range(const Arguments& arguments) {
  auto values = bind("range", arguments, {"start", "stop", "step"});
  if (values[1].undefined()) {
    values[1] = values[0];
    values[0] = 0;
  }
  const int64_t first = values[0].as_integer();
  const int64_t last = values[1].as_integer();
  const int64_t step = values[2].undefined() ? 1 : values[2].as_integer();
  if (step == 0) throw Failure("range: the step is 0");
  std::vector<Value> items;
  for (int64_t i = first; step > 0 ? i < last : i > last;) {
    if (std::ssize(items) == kLongestRange) {
      throw Failure(c10::str("range: more than ", kLongestRange, " numbers"));
    }
    items.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return items;
}

Dict dict_of(const Arguments& arguments) {
  Dict dict;
  for (const Value& given : arguments.positional) {
    if (!given.dict()) throw Failure("dict and namespace take a mapping");
    for (const auto& [key, value] : given.dict()->items) dict.set(key, value);
  }
  for (const auto& [name, value] : arguments.named) dict.set(name, value);
  return dict;
}

// The function of one rendering, which keeps what it makes.
Value name_space(Rendering& rendering) {
  const auto make = [&rendering](const Arguments& arguments) -> Value {
    constexpr int64_t kBytesOfSpace = 256;
    use_bytes(kBytesOfSpace);
    return rendering.spaces.emplace_back(
        std::make_shared<Namespace>(Namespace{dict_of(arguments)}));
  };
  return Callable{"namespace", make};
}

Value raise_exception(const Arguments& arguments) {
  throw Failure(bind("raise_exception", arguments, {"message"})[0].str());
}

Value strftime_now(const Arguments& arguments) {
  const Value format = bind("strftime_now", arguments, {"format"})[0];
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  std::array<char, 1024> buffer{};
  const size_t size =
      std::strftime(buffer.data(), buffer.size(),
                    require_text(format, "strftime_now").c_str(), &parts);
  return std::string(buffer.data(), size);
}

const std::vector<std::pair<std::string, Value>>& functions() {
  static const std::vector<std::pair<std::string, Value>> all = {
      {"range", Callable{"range", range}},
      {"dict",
       Callable{"dict",
                [](const Arguments& a) -> Value { return dict_of(a); }}},
      {"raise_exception", Callable{"raise_exception", raise_exception}},
      {"strftime_now", Callable{"strftime_now", strftime_now}},
  };
  return all;
}

}  // namespace

Template::Template(std::string_view source) {
  Tokens tokens(tokenize(source));
  Statements statements(tokens);
  std::set<std::string> names;
  for (const auto& item : functions()) names.insert(item.first);
  names.insert("namespace");
  body_ = statements.parse(names);
  marks_answers_ = statements.marks_answers();
}

Rendered Template::render(const Dict& variables, const Limits& limits) const {
  Rendering rendering;
  Frame& globals = rendering.frames.emplace_back(Frame{rendering});
  globals.names = functions();
  globals.set("namespace", name_space(rendering));
  Frame& frame = rendering.frames.emplace_back(Frame{rendering, &globals});
  for (const auto& [name, value] : variables.items) {
    frame.set(name.str(), value);
  }
  try {
    const Budget budget(limits);
    body_(frame, rendering.output);
  } catch (const Failure& failure) {
    fail_at(rendering.line, failure.what());
  }
  return {std::move(rendering.output), std::move(rendering.answers)};
}

}  // namespace tessera::data::jinja
