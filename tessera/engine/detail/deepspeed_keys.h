// The keys of DeepSpeed's configuration that are known: one list, in
// deepspeed_keys.cpp, from which follow what is read, what is refused and why,
// what has no effect, and the table of docs/guides/deepspeed.md.
//
// To add one: an entry; where it becomes more than the value of a key,
// deepspeed_settings.cpp says what.
// Source: DeepSpeed's documentation of its JSON, and its own reading of it:
//         deepspeed/runtime/{config,constants}.py, runtime/zero/config.py.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::engine::detail {

enum class DeepSpeedType { kFlag, kWhole, kNumber, kWord, kNumbers, kObject };

enum class DeepSpeedEffect {
  kBecomes,  // the value of the run's key `to`
  kPart,     // read together with others: `to` says into what
  kSame,     // `value` is what happens anyway; another has no effect
  kIdle,     // no effect, whatever the value
  kOnly,     // another value than `value` is refused
  // Of a section, whose keys are `inside`; of neither where it is not enabled.
  kIdleSection,
  kRefusedSection,
};

struct DeepSpeedKey {
  std::string name = "";  // dotted
  DeepSpeedType type;
  DeepSpeedEffect effect;
  std::string_view to = "";
  std::string_view value = "";    // JSON
  std::string_view choices = "";  // of a word, in any case: "a b c"; "": all
  std::string_view inside = "";   // "a b c"; "": any
  std::string_view why = "";      // there is no effect
  std::string_view refusal = "";  // of other values or choices
};

const std::vector<DeepSpeedKey>& deepspeed_keys();
// nullptr: unknown.
const DeepSpeedKey* deepspeed_key(std::string_view name);

// The words of "a b c".
std::vector<std::string> words_in(std::string_view list);

// Markdown: a row for keys one behind the other that become the same.
std::string deepspeed_table();

}  // namespace tessera::engine::detail
