// From a file and the command line to values.
#include <algorithm>
#include <functional>
#include <sstream>

#include "tessera/core/detail/config_impl.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::config {
namespace {

using detail::Json;
using tessera::detail::in_one_line;
using tessera::detail::in_quotes;
using tessera::detail::kMaxConfigBytes;

std::string last_part(const std::string& dotted) {
  return dotted.substr(dotted.rfind('.') + 1);
}

// The text of a file, and where its values lie.
class File {
 public:
  File(const std::string& text, const std::string& name)
      : text_(text),
        name_(name),
        root_(tessera::detail::parse_json(text, name,
                                          {.max_bytes = kMaxConfigBytes,
                                           .comments = true,
                                           .exit_code = ExitCode::kConfig})) {}

  const Json& root() const { return root_; }
  std::string place(const Json& value) const {
    return tessera::detail::place_of(value, text_, name_);
  }
  std::string place_of_key(const Json& value) const {
    return tessera::detail::place_of_key(value, text_, name_);
  }

 private:
  const std::string& text_;
  const std::string& name_;
  Json root_;
};

// Where values and their keys are, for messages.
struct Places {
  std::function<std::string(const Json&)> value, key;
};

class Resolver {
 public:
  // `prefix`: of the names of all keys.
  // `origin`: of what nothing is said of.
  explicit Resolver(Section& root, std::string prefix = "",
                    const std::string& origin = "default")
      : root_(root), prefix_(std::move(prefix)) {
    detail::for_each_key(root, prefix_,
                         [&](const std::string& name, Key::Impl& key) {
                           names_.push_back(name);
                           keys_[name] = &key;
                           origins_[name] = origin;
                         });
  }

  void read(const File& file) {
    TS_CHECK_CONFIG(file.root().is_object(), file.place(file.root()),
                    ": expected an object of sections, as {\"run\": {}}.");
    read(file.root(),
         {[&](const Json& value) { return file.place(value); },
          [&](const Json& value) { return file.place_of_key(value); }});
  }

  void read(const Json& object, const Places& places) {
    read_section(places, object, root_, prefix_);
  }

  void apply(const Override& override) {
    if (const Section* section = section_at(override.key)) {
      const auto names = names_in(*section, override.key + ".");
      TS_CHECK_CONFIG(false, override.flag, ": ", in_quotes(override.key),
                      " is a section. Set one of its keys, as ", names.at(0),
                      ".");
    }
    const auto found = keys_.find(override.key);
    TS_CHECK_CONFIG(found != keys_.end(), override.flag, ": ",
                    unknown(override.key, names_));
    const auto flag = [&](const Json&) { return override.flag; };
    set(*found->second, json_from_flag(override, *found->second), override.key,
        {flag, flag});
  }

  Provenance finish() {
    for (const auto& name : names_) {
      const Value value = keys_[name]->get();
      const auto complaint = detail::complaint_about(value, *keys_[name]);
      TS_CHECK_CONFIG(
          complaint.empty(), origins_[name], ": ", name, " is ",
          in_one_line(detail::json_of(value)), ": ", complaint,
          complaint.ends_with('?') || complaint.ends_with('.') ? "" : ".");
    }
    return std::move(origins_);
  }

 private:
  // Sections are as deep as the declarations, so this recursion is too.
  void read_section(const Places& places, const Json& object,
                    const Section& section, const std::string& prefix) {
    for (const auto& item : object.items()) {
      if (prefix.empty() && item.key() == "$schema") continue;
      const std::string name = prefix + item.key();
      if (const auto* below = section_named(section, item.key())) {
        TS_CHECK_CONFIG(item.value().is_object(), places.value(item.value()),
                        ": ", name, " is a section: expected an object, got ",
                        in_one_line(item.value()), ".");
        read_section(places, item.value(), *below, name + ".");
        continue;
      }
      const auto key = keys_.find(name);
      const std::string place = places.key(item.value());
      TS_CHECK_CONFIG(item.key().find('.') == std::string::npos, place,
                      ": unknown key ", in_quotes(name),
                      ". In a file a section is an object, not part of a "
                      "name.");
      TS_CHECK_CONFIG(key != keys_.end(), place, ": ",
                      unknown(name, names_in(section, prefix)));
      set(*key->second, item.value(), name, places);
    }
  }

  static const Section* section_named(const Section& section,
                                      const std::string& name) {
    for (const auto& item : section.impl().items) {
      const auto* below = std::get_if<NamedSection>(&item);
      if (below && below->name == name) return below->section.get();
    }
    return nullptr;
  }

  const Section* section_at(const std::string& dotted) const {
    const Section* section = &root_;
    std::istringstream parts(dotted);
    for (std::string part; section && std::getline(parts, part, '.');) {
      section = section_named(*section, part);
    }
    return section == &root_ ? nullptr : section;
  }

  static std::vector<std::string> names_in(const Section& section,
                                           const std::string& prefix) {
    std::vector<std::string> names;
    for (const auto& item : section.impl().items) {
      if (const auto* key = std::get_if<std::shared_ptr<Key::Impl>>(&item)) {
        names.push_back(prefix + (*key)->name);
      } else {
        names.push_back(prefix + std::get<NamedSection>(item).name);
      }
    }
    return names;
  }

  // The nearest by its last part beside the key, else that name anywhere.
  std::string unknown(const std::string& name,
                      const std::vector<std::string>& siblings) const {
    std::string text = "unknown key " + in_quotes(name) + ".";
    std::optional<std::string> meant = nearest(name, siblings);
    for (const auto& sibling : siblings) {
      const auto close = nearest(last_part(name), {last_part(sibling)});
      if (!meant && close) meant = sibling;
    }
    for (const auto& known : names_) {
      if (!meant && last_part(known) == last_part(name)) meant = known;
    }
    return text + (meant ? " Did you mean " + in_quotes(*meant) + "?"
                         : " 'tessera schema' lists all keys.");
  }

  // "The value is JSON; a word that is not JSON is a string", and for a list
  // several with commas between them.
  static Json json_from_flag(const Override& override, const Key::Impl& key) {
    const auto& wanted = key.default_value;
    const bool wants_list_of_words =
        std::holds_alternative<std::vector<std::string>>(wanted);
    const bool wants_words =
        std::holds_alternative<std::string>(wanted) || wants_list_of_words;
    const bool wants_numbers =
        std::holds_alternative<std::vector<double>>(wanted) ||
        std::holds_alternative<std::vector<int64_t>>(wanted);
    const bool several = override.value.find(',') != std::string::npos &&
                         !override.value.starts_with('[');
    Json json;
    try {
      const bool open = wants_numbers && !override.value.starts_with('[');
      json = tessera::detail::parse_json(
          open ? "[" + override.value + "]" : override.value, override.flag,
          {.max_bytes = kMaxConfigBytes});
    } catch (const Error&) {
      const Json word = checked_word(override);
      return wants_list_of_words && several ? words_of(override) : word;
    }
    const bool is_text = json.is_string() || json.is_array();
    return wants_words && !is_text ? Json(override.value) : json;
  }

  static Json words_of(const Override& override) {
    Json words = Json::array();
    std::istringstream parts(override.value + ",");
    for (std::string word; std::getline(parts, word, ',');) {
      TS_CHECK_CONFIG(!word.empty(), override.flag,
                      ": there is nothing between two commas, or behind the "
                      "last. A name with a comma is written as JSON: ",
                      override.key, "=", Json::array({override.value}).dump());
      words.push_back(word);
    }
    return words;
  }

  // config.json, which has every value, cannot hold bytes that are not UTF-8.
  static Json checked_word(const Override& override) {
    Json word = override.value;
    TS_CHECK_CONFIG(is_utf8(override.value), override.key, ": the value ",
                    in_one_line(word),
                    " on the command line is not UTF-8. Write it in UTF-8.");
    return word;
  }

  void set(Key::Impl& key, const Json& json, const std::string& name,
           const Places& places) {
    const std::string origin = places.value(json);
    if (key.objects) {
      set_objects(*key.objects, json, name, places);
      origins_[name] = origin;
      return;
    }
    const auto value = detail::value_of(json, key);
    TS_CHECK_CONFIG(value, origin, ": ", name, ": expected ",
                    detail::type_name(key.default_value), ", got ",
                    in_one_line(json), ".");
    key.set(*value);
    origins_[name] = origin;
  }

  // A single object stands for a list of one.
  static void set_objects(const Section::ObjectList& list, const Json& json,
                          const std::string& name, const Places& places) {
    const std::vector<const Json*> objects = objects_in(json);
    list.resize(objects.size());
    for (size_t i = 0; i < objects.size(); ++i) {
      const std::string each = name + "[" + std::to_string(i) + "]";
      TS_CHECK_CONFIG(objects[i]->is_object(), places.value(*objects[i]), ": ",
                      each, ": expected an object, got ",
                      in_one_line(*objects[i]), ".");
      Section section;
      list.declare(i, section);
      Resolver resolver(section, each + ".", places.value(*objects[i]));
      resolver.read(*objects[i], places);
      resolver.finish();
    }
  }

  static std::vector<const Json*> objects_in(const Json& json) {
    if (!json.is_array()) return {&json};
    std::vector<const Json*> objects;
    for (const Json& each : json) objects.push_back(&each);
    return objects;
  }

  Section& root_;
  const std::string prefix_;
  std::vector<std::string> names_;  // of all keys, as declared
  std::map<std::string, Key::Impl*> keys_;
  Provenance origins_;
};

}  // namespace

bool is_set(const Provenance& provenance, const std::string& key) {
  const auto origin = provenance.find(key);
  return origin != provenance.end() && origin->second != "default";
}

Provenance resolve(Section& root, const std::string& text,
                   const std::string& file_name,
                   const std::vector<Override>& overrides) {
  Resolver resolver(root);
  resolver.read(File(text, file_name));
  for (const auto& override : overrides) resolver.apply(override);
  return resolver.finish();
}

}  // namespace tessera::config
