// The typed configuration: every key is declared once, beside its owner.
//
// A section is a plain struct whose members hold the defaults:
//
//   struct BatchConfig {
//     int64_t global = 8;
//     int64_t micro = 0;
//     void declare(config::Section& section) {
//       section.key("global", global, "samples a step, over all ranks")
//           .at_least(1);
//       section.key("micro", micro, "samples a micro-batch on a rank; 0: ...")
//           .at_least(0);
//     }
//   };
//
// From declare() come the parser, the command line's --section.key=value, the
// JSON Schema, --print-config (each value and where it came from) and the
// manual. Nothing else lists keys.
//
// Errors: all are TS_CHECK_CONFIG (exit code 78). They name file:line:column
//         (or the flag), the key, the value, the rule, and for an unknown key
//         the nearest known one. A value whose part is not built is refused
//         with those words.
// Threads: none; a configuration is read before ranks start.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace tessera::config {

// The value of a list of objects: their JSON.
struct Objects {
  std::string json = "[]";
  bool operator==(const Objects&) const = default;
};

using Value =
    std::variant<bool, int64_t, double, std::string, std::vector<std::string>,
                 std::vector<double>, std::vector<int64_t>, Objects>;

// One declared key, bound to the member that receives its value.
class Key {
 public:
  // Bounds hold for single numbers; the items of a list are for check().
  Key& at_least(double minimum);
  Key& at_most(double maximum);
  Key& more_than(double bound);
  Key& one_of(std::vector<std::string> choices);
  // A check of one's own: returns the complaint, or "" when content.
  Key& check(std::function<std::string(const Value&)> complaint);

  struct Impl;
  explicit Key(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

// An object of the JSON file: keys and further sections, in order.
class Section {
 public:
  Section();
  // T: bool, int64_t, double, std::string, std::vector of string, double or
  // int64_t (a single string is accepted where a list of strings is asked
  // for). The member's present value is the default.
  Key key(const std::string& name, bool& member, const std::string& meaning);
  Key key(const std::string& name, int64_t& member, const std::string& meaning);
  Key key(const std::string& name, double& member, const std::string& meaning);
  Key key(const std::string& name, std::string& member,
          const std::string& meaning);
  Key key(const std::string& name, std::vector<std::string>& member,
          const std::string& meaning);
  Key key(const std::string& name, std::vector<double>& member,
          const std::string& meaning);
  Key key(const std::string& name, std::vector<int64_t>& member,
          const std::string& meaning);

  // A list of objects, each of which has the keys that Struct declares.
  template <typename Struct>
  Key objects(const std::string& name, std::vector<Struct>& member,
              const std::string& meaning);

  template <typename Struct>
  void section(const std::string& name, Struct& member,
               const std::string& meaning) {
    member.declare(add_section(name, meaning));
  }

  struct Impl;
  Impl& impl() { return *impl_; }
  const Impl& impl() const { return *impl_; }

  struct ObjectList;

 private:
  Key add_objects(const std::string& name, ObjectList list,
                  const std::string& meaning);
  Section& add_section(const std::string& name, const std::string& meaning);
  std::shared_ptr<Impl> impl_;
};

// What a key of a list of objects is bound to.
struct Section::ObjectList {
  std::shared_ptr<void> plain;  // an object as its defaults make it
  Section plain_section;        // bound to that
  std::function<size_t()> size;
  std::function<void(size_t)> resize;  // to so many plain ones
  std::function<void(size_t, Section&)> declare;
};

template <typename Struct>
Key Section::objects(const std::string& name, std::vector<Struct>& member,
                     const std::string& meaning) {
  const auto plain = std::make_shared<Struct>();
  ObjectList list{
      .plain = plain,
      .plain_section = {},
      .size = [&member] { return member.size(); },
      .resize = [&member](size_t count) { member.assign(count, Struct()); },
      .declare = [&member](
                     size_t i,
                     Section& section) { member.at(i).declare(section); }};
  plain->declare(list.plain_section);
  return add_objects(name, std::move(list), meaning);
}

// "--set a.b=value" or "--a.b=value". The value is JSON; a word that is not
// JSON is a string, and for a key that is a list "a,b" is one of two.
struct Override {
  std::string key;
  std::string value;
  std::string flag;  // as typed, for messages and provenance
};

// Where each key's value came from: "default", "run.json:3:14", "--set ...".
using Provenance = std::map<std::string, std::string>;

// Whether the user set the key, and it was not left at its default.
bool is_set(const Provenance& provenance, const std::string& key);

// Sets the members bound in `root` from the file's text (JSON with // comments)
// and then the overrides, last wins; checks every value.
Provenance resolve(Section& root, const std::string& text,
                   const std::string& file_name,
                   const std::vector<Override>& overrides);

// The values now in the members, as JSON that resolve() reads back the same.
std::string to_json(const Section& root);
// A table: key, value, where it came from.
std::string print(const Section& root, const Provenance& provenance);
// JSON Schema (2020-12) of the file.
std::string schema(const Section& root);
// The manual's chapter on the configuration, in Markdown.
std::string manual(const Section& root);

// What a manual says of a key, or of a section, which has no default value.
struct Entry {
  std::string name;  // dotted
  std::string meaning;
  std::string default_value;  // JSON
  std::string rules;          // "at least 1, at most 1000"
};

// Of every section and key: a section's keys behind it, then its sections.
std::vector<Entry> entries(const Section& root);

// The candidate nearest to `word` by edit distance, where one is near enough to
// be meant. Also for sub-commands and flags.
std::optional<std::string> nearest(const std::string& word,
                                   const std::vector<std::string>& candidates);

}  // namespace tessera::config
