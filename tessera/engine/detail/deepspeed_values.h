// What a file of DeepSpeed's says, each value checked against the list of keys.
//
// Errors: TS_CHECK_CONFIG, with file:line:column, the key and the way out.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/core/detail/json.h"
#include "tessera/engine/detail/deepspeed_keys.h"

namespace tessera::engine::detail {

using tessera::detail::Json;

struct DeepSpeedValue {
  const DeepSpeedKey* key = nullptr;
  Json value;  // of the key's type: 2e8 is a whole number
  // "ds.json:3:14: zero_optimization.stage"
  std::string origin;
};

class DeepSpeedValues {
 public:
  // REQUIRES: `text` and `source` live as long as the constructor runs.
  DeepSpeedValues(const std::string& text, const std::string& source);

  const std::string& source() const { return source_; }
  // nullptr where the file does not say, says null or "auto", or does not
  // enable the section.
  const DeepSpeedValue* find(const std::string& name) const;
  bool is_true(const std::string& name) const;
  double number_or(const std::string& name, double otherwise) const;
  // "auto" is not left open: the run's value is meant, or its default.
  bool is_auto(const std::string& name) const;
  bool is_open(const std::string& name) const {
    return find(name) == nullptr && !is_auto(name);
  }
  // Any key of the section that is not null.
  bool has_section(const std::string& name) const;

  // In the order of the file.
  const std::vector<DeepSpeedValue>& all() const { return values_; }
  // What was asked for and is not done: name and reason.
  const std::vector<std::pair<std::string, std::string>>& without_effect()
      const {
    return without_effect_;
  }

 private:
  class Reader;
  void leave_out_disabled();
  void find_without_effect();

  std::string source_;
  std::vector<DeepSpeedValue> values_;
  std::vector<std::string> autos_;
  std::vector<std::pair<std::string, std::string>> without_effect_;
};

// The word among "a b c" that is `word` in any case; "": none.
std::string choice_of(const std::string& word, std::string_view choices);

}  // namespace tessera::engine::detail
