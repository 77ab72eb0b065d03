#include "cli/overrides.h"

#include <algorithm>
#include <map>

#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

config::Override override_of(const std::string& assignment,
                             const std::string& flag) {
  const size_t equals = assignment.find('=');
  TS_CHECK_USAGE(equals != std::string::npos && equals > 0, flag,
                 ": expected key=value, as in --set batch.global=64.");
  return {assignment.substr(0, equals), assignment.substr(equals + 1), flag};
}

// CLI11 has no place for what is known of a command beside its flags.
std::map<const CLI::App*, std::vector<std::string>>& keys_by_command() {
  static std::map<const CLI::App*, std::vector<std::string>> keys;
  return keys;
}

}  // namespace

void take_keys(CLI::App& command, std::vector<std::string> keys) {
  command.allow_extras();
  keys_by_command()[&command] = std::move(keys);
}

void add_sets(CLI::App& command, std::vector<std::string>& sets) {
  command
      .add_option("--set", sets,
                  "key=value, as in batch.global=64; as often as needed")
      ->allow_extra_args(false);
}

bool takes_key(const CLI::App& command, const std::string& key) {
  const auto found = keys_by_command().find(&command);
  if (found == keys_by_command().end()) return false;
  const auto& keys = found->second;
  return keys.empty() || std::ranges::count(keys, key) > 0;
}

std::vector<config::Override> overrides_of(
    const std::vector<std::string>& sets,
    const std::vector<std::string>& extras) {
  std::vector<config::Override> overrides;
  for (const auto& set : sets) {
    overrides.push_back(override_of(set, "--set " + set));
  }
  for (size_t i = 0; i < extras.size(); ++i) {
    std::string word = extras[i];
    const std::string key = word.substr(0, word.find('='));
    TS_CHECK_USAGE(key.starts_with("--") && key.find('.') != key.npos,
                   "unknown argument ", word,
                   ". Configuration keys are written --section.key=value; "
                   "'--help' lists the rest.");
    if (key == word) {
      TS_CHECK_USAGE(i + 1 < extras.size(), word, ": its value is missing.");
      word += "=" + extras[++i];
    }
    overrides.push_back(override_of(word.substr(2), word));
    // Which of the two comes last is not known here.
    for (size_t set = 0; set < sets.size(); ++set) {
      TS_CHECK_USAGE(overrides[set].key != overrides.back().key, word, " and ",
                     overrides[set].flag,
                     " set one key. Leave one of them out.");
    }
  }
  return overrides;
}

void take_random_tokens(engine::RunConfig& config) {
  config.data.train = {"random tokens"};
  config.data.weights.clear();
}

}  // namespace tessera::cli
