// The configuration told: as JSON, as a table, as a schema, as a manual.
#include <algorithm>
#include <array>

#include "tessera/core/detail/config_impl.h"

namespace tessera::config {
namespace {

using detail::joined;
using detail::Json;

Json schema_of(const Section& section);

Json json_type(const Value& value) {
  constexpr std::array<const char*, 4> kScalars = {"boolean", "integer",
                                                   "number", "string"};
  if (value.index() < kScalars.size()) {
    return {{"type", kScalars[value.index()]}};
  }
  constexpr std::array<const char*, 3> kItems = {"string", "number", "integer"};
  const char* item = kItems[value.index() - kScalars.size()];
  const Json list = {{"type", "array"}, {"items", {{"type", item}}}};
  if (!std::holds_alternative<std::vector<std::string>>(value)) return list;
  return {{"anyOf", Json::array({{{"type", "string"}}, list})}};
}

Json number_of(double value, const Key::Impl& key) {
  if (std::holds_alternative<int64_t>(key.default_value)) {
    return static_cast<int64_t>(value);
  }
  return value;
}

Json schema_of(const Key::Impl& key) {
  Json json = key.objects
                  ? Json{{"type", "array"},
                         {"items", schema_of(key.objects->plain_section)}}
                  : json_type(key.default_value);
  json["description"] = key.meaning;
  json["default"] = detail::json_of(key.default_value);
  if (!key.choices.empty()) json["enum"] = key.choices;
  if (key.minimum) json["minimum"] = number_of(*key.minimum, key);
  if (key.maximum) json["maximum"] = number_of(*key.maximum, key);
  if (key.bound) json["exclusiveMinimum"] = number_of(*key.bound, key);
  return json;
}

Json schema_of(const Section& section) {
  Json properties = Json::object();
  for (const auto& item : section.impl().items) {
    if (const auto* key = std::get_if<std::shared_ptr<Key::Impl>>(&item)) {
      properties[(*key)->name] = schema_of(**key);
    } else {
      const auto& below = std::get<NamedSection>(item);
      Json json = schema_of(*below.section);
      json["description"] = below.meaning;
      properties[below.name] = std::move(json);
    }
  }
  return {{"type", "object"},
          {"properties", std::move(properties)},
          {"additionalProperties", false}};
}

// Each with its default and meaning: "lr (-1: ...)".
std::string keys_of(const Section::ObjectList& objects) {
  std::string text;
  detail::for_each_key(
      objects.plain_section, "", [&](const std::string& name, Key::Impl& key) {
        text += (text.empty() ? "" : "; ") + name + " (" +
                detail::json_of(key.default_value).dump() + "), " + key.meaning;
      });
  return text;
}

std::string rules_of(const Key::Impl& key) {
  std::vector<std::string> rules;
  if (!key.choices.empty()) rules.push_back("one of " + joined(key.choices));
  if (key.objects) rules.push_back("objects: " + keys_of(*key.objects));
  if (key.minimum) {
    rules.push_back("at least " + number_of(*key.minimum, key).dump());
  }
  if (key.bound) {
    rules.push_back("more than " + number_of(*key.bound, key).dump());
  }
  if (key.maximum) {
    rules.push_back("at most " + number_of(*key.maximum, key).dump());
  }
  return joined(rules);
}

void add_entries(const Section& section, const std::string& prefix,
                 std::vector<Entry>& entries) {
  for (const auto& item : section.impl().items) {
    if (const auto* key = std::get_if<std::shared_ptr<Key::Impl>>(&item)) {
      entries.push_back({prefix + (*key)->name, (*key)->meaning,
                         detail::json_of((*key)->default_value).dump(),
                         rules_of(**key)});
    }
  }
  for (const auto& item : section.impl().items) {
    if (const auto* below = std::get_if<NamedSection>(&item)) {
      const std::string name = prefix + below->name;
      entries.push_back({name, below->meaning, "", ""});
      add_entries(*below->section, name + ".", entries);
    }
  }
}

}  // namespace

Json detail::values_of(const Section& section) {
  Json json = Json::object();
  for (const auto& item : section.impl().items) {
    if (const auto* key = std::get_if<std::shared_ptr<Key::Impl>>(&item)) {
      json[(*key)->name] = json_of((*key)->get());
    } else {
      const auto& below = std::get<NamedSection>(item);
      json[below.name] = values_of(*below.section);
    }
  }
  return json;
}

std::string to_json(const Section& root) {
  return detail::values_of(root).dump(2) + "\n";
}

std::string print(const Section& root, const Provenance& provenance) {
  struct Row {
    std::string key, value, origin;
  };
  std::vector<Row> rows;
  size_t key_width = 0, value_width = 0;
  detail::for_each_key(root, "", [&](const std::string& name, Key::Impl& key) {
    const auto origin = provenance.find(name);
    rows.push_back({name, detail::json_of(key.get()).dump(),
                    origin == provenance.end() ? "" : origin->second});
    key_width = std::max(key_width, rows.back().key.size());
    value_width = std::max(value_width, rows.back().value.size());
  });
  std::string text;
  for (auto& row : rows) {
    row.key.resize(key_width, ' ');
    row.value.resize(value_width, ' ');
    text += row.key + "  " + row.value + "  " + row.origin + "\n";
  }
  return text;
}

std::string schema(const Section& root) {
  Json json = {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
               {"title", "Configuration of a Tessera run"}};
  json.update(schema_of(root));
  json["properties"]["$schema"] = {{"type", "string"}};
  return json.dump(2) + "\n";
}

std::vector<Entry> entries(const Section& root) {
  std::vector<Entry> list;
  add_entries(root, "", list);
  return list;
}

std::string manual(const Section& root) {
  std::string text = "# Configuration\n";
  for (const auto& entry : entries(root)) {
    if (entry.default_value.empty()) {
      text += "\n## " + entry.name + "\n\n" + entry.meaning +
              "\n\n| key | default | meaning | values |\n"
              "| --- | --- | --- | --- |\n";
    } else {
      text += "| `" + entry.name + "` | `" + entry.default_value + "` | " +
              entry.meaning + " | " + entry.rules + " |\n";
    }
  }
  return text;
}

}  // namespace tessera::config
