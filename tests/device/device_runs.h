// What tests of devices share: which device there is, and small runs on it.
#pragma once

#include <ATen/Context.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/rank_model.h"
#include "tessera/engine/run_devices.h"
#include "tessera/nn/fp8_product.h"
#include "tessera/nn/gpu/program.h"
#include "tessera/verify/random_batch.h"
#include "tests/support/test_device.h"

namespace tessera::testing {

inline constexpr const char* kNoDevice =
    "needs a GPU, beside a LibTorch with CUDA";

// A GPU, where there is one; none: see has_test_device().
inline std::optional<at::Device> device() {
  if (at::hasCUDA()) return at::Device(at::kCUDA, 0);
  if (has_test_device()) return test_device();
  return std::nullopt;
}

inline constexpr const char* kNoFp8 = "needs a GPU of compute capability 8.9";

inline bool multiplies_fp8() {
  return !at::hasCUDA() ||
         nn::gpu::least_capability() >= nn::kLeastFp8Capability;
}

// Whether one kernel takes the products of all experts, of bf16.
inline bool multiplies_groups() {
  return !at::hasCUDA() || nn::gpu::least_capability() >= 90;
}

using Keys = std::vector<std::pair<const char*, const char*>>;

inline constexpr const char* kBase = R"({
  "model": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48,
            "vocab": 61, "max_seq": 16},
  "data": {"train": "tokens made here", "seq_len": 16},
  "batch": {"global": 8},
  "precision": {"compute": "fp64"}})";

// The base with these keys.
inline engine::RunConfig run_without_device(const Keys& keys) {
  std::vector<config::Override> overrides;
  for (const auto& [key, value] : keys) {
    overrides.push_back({.key = key, .value = value, .flag = key});
  }
  return engine::run_config_from_text(kBase, "base", overrides);
}

inline engine::RunConfig configuration(const Keys& keys, int64_t ranks,
                                       at::Device device) {
  engine::RunConfig config = run_without_device(keys);
  engine::complete(config, ranks);
  config.run.device_types = {device.type()};
  engine::check_device(config);
  return config;
}

// Of random tokens.
inline void step(engine::RankModel& model, const engine::RunConfig& config,
                 int64_t number) {
  model.step(engine::step_input(
      config, number, /*lr=*/1e-2, [&](int64_t of, int64_t first, int64_t n) {
        return verify::random_batch(config, of, first, n);
      }));
}

}  // namespace tessera::testing
