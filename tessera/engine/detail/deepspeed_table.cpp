// The list of keys as the guide has it.
#include "tessera/core/units.h"
#include "tessera/engine/detail/deepspeed_keys.h"

namespace tessera::engine::detail {
namespace {

using Effect = DeepSpeedEffect;

std::string in_code(std::string_view word) {
  return "`" + std::string(word) + "`";
}

std::string told(const DeepSpeedKey& key) {
  const std::string why(key.why), refusal(key.refusal);
  const std::string others = key.choices.empty()
                                 ? ""
                                 : "; others than " +
                                       some_of(words_in(key.choices), 16) +
                                       " are refused: " + refusal;
  switch (key.effect) {
    case Effect::kBecomes:
      return in_code(key.to);
    case Effect::kPart:
      return std::string(key.to) + others;
    case Effect::kSame:
      return in_code(key.value) + " is so; else no effect: " + why + others;
    case Effect::kOnly:
      return in_code(key.value) + "; else it is refused: " + refusal;
    case Effect::kRefusedSection:
      return "refused where it is enabled: " + refusal;
    case Effect::kIdle:
    case Effect::kIdleSection:
      break;
  }
  return "no effect: " + why;
}

}  // namespace

std::string deepspeed_table() {
  std::string text = "| DeepSpeed | here |\n| --- | --- |\n", names, before;
  const auto end_row = [&] {
    if (!names.empty()) text += "| " + names + " | " + before + " |\n";
    names.clear();
  };
  for (const auto& key : deepspeed_keys()) {
    const std::string now = told(key);
    if (now != before) end_row();
    names += (names.empty() ? "" : ", ") + in_code(key.name);
    before = now;
  }
  end_row();
  return text;
}

}  // namespace tessera::engine::detail
