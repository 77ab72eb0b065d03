// What the values of DeepSpeed's file become in the configuration of a run.
// Pure functions: nothing is set here.
//
// Errors: TS_CHECK_CONFIG, with each key's place.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/detail/deepspeed_values.h"
#include "tessera/engine/run_config.h"

namespace tessera::engine::detail {

struct DeepSpeedSetting {
  std::string key;  // of the run
  Json value;
  std::string origin;
  bool yields = false;  // to the run's
  // DeepSpeed's own, where its file says nothing: it yields.
  bool is_default = false;
  // It was reckoned: the run's may differ in the last bits.
  bool is_rounded = false;
};

struct DeepSpeedSettings {
  std::vector<DeepSpeedSetting> settings;
  // Given, and overruled by another key: name and reason.
  std::vector<std::pair<std::string, std::string>> without_effect;
};

// What follows from the file alone.
DeepSpeedSettings plain_settings(const DeepSpeedValues& values);

// What follows from it and from the learning rate and number types of the run.
// REQUIRES: `config` has the plain settings.
std::vector<DeepSpeedSetting> settings_that_follow(
    const DeepSpeedValues& values, const RunConfig& config);

// batch.global and batch.micro for a world of so many ranks, by
//   train_batch_size = data-parallel degree x train_micro_batch_size_per_gpu
//                      x gradient_accumulation_steps,
// of whose last three what is open follows; where the file gives none of the
// three, nothing does. REQUIRES: `config` has the settings before.
std::vector<DeepSpeedSetting> batch_settings(const DeepSpeedValues& values,
                                             const RunConfig& config,
                                             const config::Provenance& origins,
                                             int64_t world_size);

// For a search, which has no degree yet: that the batch does not hang on it
// (TS_CHECK_CONFIG). Returns what has no effect there, with the reason, or "".
// REQUIRES: as batch_settings().
std::string check_searched_batch(const DeepSpeedValues& values,
                                 const RunConfig& config,
                                 const config::Provenance& origins);

}  // namespace tessera::engine::detail
