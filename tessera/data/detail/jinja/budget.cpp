#include "tessera/data/detail/jinja/budget.h"

#include <c10/util/StringUtil.h>

#include "tessera/core/units.h"
#include "tessera/data/detail/jinja/value.h"

namespace tessera::data::jinja {
namespace {

thread_local Budget* current = nullptr;

constexpr int64_t kPerByteOfInput = 64;
constexpr int64_t kScannedAStep = 16;  // bytes

}  // namespace

Limits Limits::for_input(int64_t bytes) {
  Limits limits;
  limits.steps += kPerByteOfInput * bytes;
  limits.bytes += kPerByteOfInput * bytes;
  return limits;
}

Budget::Budget(const Limits& limits)
    : limits_(limits),
      steps_left_(limits.steps),
      bytes_left_(limits.bytes),
      outer_(std::exchange(current, this)) {}

Budget::~Budget() { current = outer_; }

void Budget::use_steps(int64_t steps) {
  if (steps <= steps_left_) {
    steps_left_ -= steps;
    return;
  }
  throw Failure(c10::str(
      "one rendering takes more than ", limits_.steps,
      " steps, far above what a model's template needs. Does a loop go on "
      "within loops? Give a template that does less, or shorter messages"));
}

void Budget::use_bytes(int64_t bytes) {
  if (bytes <= bytes_left_) {
    bytes_left_ -= bytes;
    return;
  }
  throw Failure(c10::str(
      "one rendering makes more than ", bytes_text(limits_.bytes),
      " of texts and lists, far above what a model's template needs. Does a "
      "loop double a text? Give a template that makes less, or shorter "
      "messages"));
}

void use_steps(int64_t steps) {
  if (current != nullptr) current->use_steps(steps);
}

void use_bytes(int64_t bytes) {
  if (current != nullptr) current->use_bytes(bytes);
}

void use_scan(int64_t bytes) { use_steps(1 + bytes / kScannedAStep); }

}  // namespace tessera::data::jinja
