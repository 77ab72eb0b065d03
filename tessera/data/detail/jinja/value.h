// What the variables of a template are: Python's values, as far as templates
// of chats meet them.
//
// Values are immutable but for a namespace, and cheap to copy: what has items
// or text is shared. Text is UTF-8, counted in code points as Python counts.
// Making a value uses the rendering's budget (budget.h).
// Errors: Failure, whose words Template puts behind the place.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera::data::jinja {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Value;

struct Undefined {
  std::string what;  // "'x' is undefined": said where it is used
};
struct None {};
struct Text {
  std::string text;
  bool markup = false;  // of `safe` and `escape`: others are escaped beside it
};
struct Sequence;
struct Dict;
struct Namespace;
struct Callable;

class Value {
 public:
  Value() : held_(Undefined{}) {}
  Value(Undefined value) : held_(std::move(value)) {}
  Value(None value) : held_(value) {}
  Value(bool value) : held_(value) {}
  Value(int value) : held_(int64_t{value}) {}
  Value(int64_t value) : held_(value) {}
  Value(double value) : held_(value) {}
  Value(const char* value);
  Value(std::string value);
  Value(Text value);
  Value(std::vector<Value> items, bool tuple = false);
  Value(Dict dict);
  Value(std::shared_ptr<Namespace> space) : held_(std::move(space)) {}
  Value(Callable callable);

  // Null where it is none.
  const Undefined* undefined() const { return std::get_if<Undefined>(&held_); }
  const bool* boolean() const { return std::get_if<bool>(&held_); }
  const int64_t* integer() const { return std::get_if<int64_t>(&held_); }
  const double* floating() const { return std::get_if<double>(&held_); }
  const Text* text() const { return pointer<const Text>(); }
  const Sequence* sequence() const { return pointer<const Sequence>(); }
  const Dict* dict() const { return pointer<const Dict>(); }
  Namespace* name_space() const { return pointer<Namespace>(); }
  const Callable* callable() const { return pointer<const Callable>(); }
  bool is_none() const { return std::holds_alternative<None>(held_); }
  bool is_number() const { return boolean() || integer() || floating(); }

  bool truth() const;
  std::string type_name() const;  // as Python has it
  std::string str() const;        // as str() and {{ }} write it
  std::string repr() const;
  // REQUIRES: is_number() for as_double(). Failure where it is no whole number.
  int64_t as_integer() const;
  double as_double() const;
  // Of lists and mappings in each other; 0 of anything else.
  int depth() const;

 private:
  template <typename T>
  T* pointer() const {
    const auto* held = std::get_if<std::shared_ptr<T>>(&held_);
    return held == nullptr ? nullptr : held->get();
  }

  std::variant<Undefined, None, bool, int64_t, double,
               std::shared_ptr<const Text>, std::shared_ptr<const Sequence>,
               std::shared_ptr<const Dict>, std::shared_ptr<Namespace>,
               std::shared_ptr<const Callable>>
      held_;
};

struct Sequence {
  std::vector<Value> items;
  bool tuple = false;
  int depth = 1;
};
struct Dict {
  std::vector<std::pair<Value, Value>> items = {};  // as they were put in
  int depth = 1;
  const Value* find(const Value& key) const;
  const Value* named(std::string_view name) const;
  void set(const Value& key, Value value);
};
// namespace(...) and a loop's variable.
struct Namespace {
  Dict attributes = {};
  bool is_loop = false;  // which nothing changes
};
struct Arguments {
  std::vector<Value> positional = {};
  std::vector<std::pair<std::string, Value>> named = {};
};
struct Callable {
  std::string name;
  std::function<Value(const Arguments&)> call;
};

// How deep what holds such a value is. Failure where it is too deep: what goes
// down into values must not use up the stack.
int depth_around(const Value& value, int so_far = 1);

bool equal(const Value& a, const Value& b);
bool less(const Value& a, const Value& b);

// Failure that says why an undefined value cannot be used; else nothing.
void require_defined(const Value& value);
// Its text; of an undefined one, "".
std::string soft_text(const Value& value);
// Failure that names `use` where it is no text.
const std::string& require_text(const Value& value, const std::string& use);

// Values of the named parameters of `function`, undefined where none was given.
std::vector<Value> bind(const std::string& function, const Arguments& arguments,
                        std::initializer_list<const char*> parameters);

std::string repr_of(double number);

}  // namespace tessera::data::jinja
