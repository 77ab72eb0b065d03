// The devices that the ranks of a run compute with.
//
// run.device names one for all ranks, or one for each stage of the pipeline.
// auto is the GPU where this host has one and all that is asked for is built
// for it, else the CPU.
// Errors: TS_CHECK_CONFIG; of device_type_of() (core/device.h).
#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/engine/run_config.h"

namespace tessera::engine {

// What is wrong with the value of run.device by itself; "": nothing.
std::string complaint_about_devices(const config::Value& value);

// Fills run.device_types in, for so many stages.
void find_devices(RunConfig& config, int64_t stages);

// The kind of device that a rank of the run computes with, and those of all.
c10::DeviceType device_of_rank(const RunConfig& config, int64_t rank);
std::vector<c10::DeviceType> devices_of_ranks(const RunConfig& config,
                                              int64_t world_size);

// What is asked for and no GPU is built for, and what to use instead. Then
// run.device auto is the CPU; else the GPU, where there is one.
struct NotOnGpus {
  std::string what;
  const char* instead;
};
std::optional<NotOnGpus> why_not_on_gpus(const RunConfig& config);
// That all of it is built for the devices of run.device.
void check_device(const RunConfig& config);
// That GPUs of this compute capability, as 89 for 8.9, multiply as
// precision.products asks for.
void check_products(const RunConfig& config, int capability);
// That its products are emulated where a rank computes on the CPU, in words; ""
// where none are. REQUIRES: a completed configuration.
std::string emulation_text(const RunConfig& config);

}  // namespace tessera::engine
