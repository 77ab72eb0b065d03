// What one rendering may use: steps, and bytes of the texts and lists that it
// makes, so that a template can neither go on for ever nor take all memory.
//
// A Budget counts for its thread while it lives; without one nothing counts.
// Units: a step is a part of an expression or of a tag, or an item or a few
//        bytes of text that one goes over.
// Errors: Failure that names the limit.
#pragma once

#include <cstdint>

namespace tessera::data::jinja {

// Far above what templates of models need, which is some hundred steps and a
// few times its text for a message.
struct Limits {
  int64_t steps = 200'000'000;
  int64_t bytes = int64_t{1} << 29;

  // With what a large input needs beside it.
  static Limits for_input(int64_t bytes);
};

class Budget {
 public:
  explicit Budget(const Limits& limits);
  ~Budget();
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  void use_steps(int64_t steps);
  void use_bytes(int64_t bytes);

 private:
  Limits limits_;
  int64_t steps_left_, bytes_left_;
  Budget* outer_;
};

// On the budget of this thread, where there is one.
void use_steps(int64_t steps);
// Before they are made.
void use_bytes(int64_t bytes);
// Goes over a text of so many bytes.
void use_scan(int64_t bytes);

}  // namespace tessera::data::jinja
