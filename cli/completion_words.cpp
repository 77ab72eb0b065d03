#include "cli/completion_words.h"

#include <algorithm>
#include <sstream>

#include "cli/overrides.h"
#include "tessera/core/config.h"
#include "tessera/core/detail/json.h"
#include "tessera/engine/run_config.h"

namespace tessera::cli {
namespace {

using detail::Json;

// CLI11 tells what an option takes by its type's name alone: "INT",
// "TEXT:{fp32,bf16}".
std::vector<std::string> choices_of(const std::string& type) {
  const size_t begin = type.find('{'), end = type.find('}');
  if (begin == type.npos || end == type.npos) return {};
  std::istringstream inside(type.substr(begin + 1, end - begin - 1));
  std::vector<std::string> choices;
  for (std::string each; std::getline(inside, each, ',');) {
    choices.push_back(each);
  }
  return choices;
}

bool is_text(const std::string& type) { return type.starts_with("TEXT"); }

void add_flags(const CLI::App& command, std::vector<OfferedFlag>& flags) {
  const auto add = [&](const CLI::Option& option, const std::string& text) {
    // A group of flags has its own --help.
    const bool has = std::ranges::count(flags, text, &OfferedFlag::text) > 0;
    if (has) return;
    OfferedFlag flag{{text, option.get_description()}};
    flag.takes_value = option.get_items_expected_min() > 0;
    if (flag.takes_value) flag.choices = choices_of(option.get_type_name());
    flag.takes_file = flag.takes_value && flag.choices.empty() &&
                      is_text(option.get_type_name());
    flags.push_back(std::move(flag));
  };
  for (const CLI::Option* option : command.get_options()) {
    for (const auto& name : option->get_lnames()) add(*option, "--" + name);
    for (const auto& name : option->get_snames()) add(*option, "-" + name);
  }
}

// Those of a section of the schema, and of the sections in it.
void add_keys(const Json& section, const std::string& path,
              std::vector<OfferedFlag>& keys) {
  for (const auto& [name, value] : section["properties"].items()) {
    if (name.starts_with('$')) continue;  // an editor's, in files alone
    if (value.contains("properties")) {
      add_keys(value, path + name + ".", keys);
      continue;
    }
    OfferedFlag key{{path + name, value.value("description", "")}};
    key.takes_value = true;
    const Json type = value.value("type", Json());
    if (value.contains("enum")) {
      key.choices = value["enum"].get<std::vector<std::string>>();
    } else if (type == "boolean") {
      key.choices = {"true", "false"};
    }
    key.takes_file =
        key.choices.empty() && type != "integer" && type != "number";
    keys.push_back(std::move(key));
  }
}

std::vector<OfferedFlag> all_keys() {
  engine::RunConfig config;
  config::Section root;
  config.declare(root);
  std::vector<OfferedFlag> keys;
  add_keys(detail::parse_json(config::schema(root), "the schema"), "--", keys);
  return keys;
}

bool is_positional(const CLI::Option* option) {
  return !option->nonpositional();
}

void add_command(const CLI::App& command, const std::string& path,
                 const std::vector<OfferedFlag>& keys,
                 std::vector<OfferedCommand>& all) {
  OfferedCommand offered{.path = path};
  const size_t place = all.size();
  all.emplace_back();
  for (const CLI::App* below : command.get_subcommands(nullptr)) {
    if (below->get_name().empty()) {
      add_flags(*below, offered.flags);        // a group of flags
    } else if (!below->get_group().empty()) {  // else it is hidden
      offered.operands.push_back({below->get_name(), below->get_description()});
      add_command(*below, path + " " + below->get_name(), keys, all);
    }
  }
  add_flags(command, offered.flags);
  for (const CLI::Option* option : command.get_options(is_positional)) {
    for (const auto& choice : choices_of(option->get_type_name())) {
      offered.operands.push_back({choice, option->get_description()});
    }
    offered.takes_files |=
        offered.operands.empty() && is_text(option->get_type_name());
  }
  std::ranges::copy_if(
      keys, std::back_inserter(offered.keys), [&](const OfferedFlag& key) {
        return takes_key(command, key.text.substr(std::string("--").size()));
      });
  all[place] = std::move(offered);
}

}  // namespace

std::vector<OfferedCommand> offered_commands(const CLI::App& program) {
  std::vector<OfferedCommand> all;
  add_command(program, "", all_keys(), all);
  return all;
}

}  // namespace tessera::cli
