// Floating-point operations by dispatch. REQUIRES: to be included once in a
// program, for it registers what it is called by.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <utility>

#include "tessera/program/facts.h"

namespace tessera::testing {

// Floating-point operations of what is dispatched on this thread, below
// autograd, while one lives. (RecordFunction hands out no inputs here: its
// header has to be compiled as LibTorch was.)
class FlopCounter {
 public:
  FlopCounter() { sum = {}; }
  static program::Flops take() { return std::exchange(sum, {}); }

  static void see(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    count(op.schema().name(),
          torch::jit::last(*stack, op.schema().arguments().size()));
    const c10::impl::ExcludeDispatchKeyGuard once(kKey);
    op.redispatchBoxed(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey),
        stack);
  }
  static constexpr auto kKey = c10::DispatchKey::Fake;

 private:
  static void count(const std::string& name,
                    c10::ArrayRef<c10::IValue> inputs) {
    const std::string flash =
        "aten::_scaled_dot_product_flash_attention_for_cpu";
    const auto shape = [&](size_t i) { return inputs[i].toTensor().sizes(); };
    if (name == "aten::mm") {
      sum.matmul += 2 * shape(0)[0] * shape(0)[1] * shape(1)[1];
    } else if (name == "aten::addmm") {
      sum.matmul += 2 * shape(1)[0] * shape(1)[1] * shape(2)[1];
    } else if (name == flash) {
      sum.attention += 4 * c10::multiply_integers(shape(0)) * shape(1)[2];
    } else if (name == flash + "_backward") {
      sum.attention += 10 * c10::multiply_integers(shape(1)) * shape(2)[2];
    } else if (name == "tessera::flash_attention") {
      sum.attention += 4 * shape(0)[0] * shape(0)[2] * shape(0)[3] *
                       pairs_of(shape(0)[1], shape(1)[1], inputs[4]);
    } else if (name == "tessera::flash_attention_backward") {
      sum.attention += 10 * shape(1)[0] * shape(1)[2] * shape(1)[3] *
                       pairs_of(shape(1)[1], shape(2)[1], inputs[7]);
    } else if (name.find("mm") != std::string::npos ||
               name.find("attention") != std::string::npos) {
      ADD_FAILURE() << name << " is not counted";
    }
  }

  // Of nn::FlashRuns. Of the same tokens the first see as many as the last.
  static int64_t pairs_of(int64_t queries, int64_t keys,
                          const c10::IValue& runs) {
    const auto of = runs.toIntVector();
    const bool is_causal = of[0] == 1;
    const int64_t first_query = of[1], first_key = of[2], window = of[3];
    if (window == 0) return queries * keys;
    if (is_causal) return queries * std::min(window, keys);
    int64_t pairs = 0;
    for (int64_t q = first_query; q < first_query + queries; ++q) {
      for (int64_t k = first_key; k < first_key + keys; ++k) {
        if (k > q - window) ++pairs;
      }
    }
    return pairs;
  }

  static thread_local program::Flops sum;
  c10::impl::IncludeDispatchKeyGuard guard_{kKey};
};
thread_local program::Flops FlopCounter::sum;

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(
      torch::CppFunction::makeFromBoxedFunction<&FlopCounter::see>());
}

}  // namespace tessera::testing
