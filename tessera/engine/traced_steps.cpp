#include "tessera/engine/traced_steps.h"

#include <string>
#include <utility>

namespace tessera::engine {

using program::Instruction;
using program::Op;

namespace {

// What a span or an instruction of this name does.
std::optional<Op> op_named(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(Op::kReleaseParameters); ++i) {
    if (name == program::name_of(static_cast<Op>(i))) {
      return static_cast<Op>(i);
    }
  }
  return std::nullopt;
}

}  // namespace

// As program::describe() wrote it.
std::optional<Instruction> instruction_of(const monitor::Span& span) {
  std::string words = span.name;
  Instruction each;
  for (const auto& [word, phase] :
       {std::pair("begin ", program::Phase::kBegin),
        std::pair("await ", program::Phase::kAwait)}) {
    if (!words.starts_with(word)) continue;
    each.phase = phase;
    words = words.substr(std::string(word).size());
  }
  const auto op = op_named(words.substr(0, words.find(' ')));
  if (!op) return std::nullopt;
  each.op = *op;
  for (const auto& [name, value] : span.args) {
    const std::string key = name;
    if (key == "microbatch") each.microbatch = value;
    if (key == "unit") each.unit = value;
    if (key == "chunk") each.chunk = value;
  }
  return each;
}

}  // namespace tessera::engine
