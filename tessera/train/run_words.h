// What a run says of itself before its first step: the devices, the shares of
// its ranks, what is multiplied in fp8.
#pragma once

#include "tessera/comm/group.h"
#include "tessera/engine/rank_model.h"
#include "tessera/engine/run_config.h"

namespace tessera::train {

// Each host finds its own devices, but plans are made of all: TS_CHECK_CONFIG
// on every rank where two found others. Comm: over `world`.
void compare_devices(const engine::RunConfig& config, comm::Group& world);

void tell_devices(const engine::RunConfig& config);
// `speeds_are_measured`: those in the configuration, just now.
void tell_shares(const engine::RunConfig& config, bool speeds_are_measured);
// Modules of model.from that this run has none of.
void tell_left_out(const engine::RunConfig& config);
// Adapters that no folder of PEFT can hold.
void tell_adapters(const engine::RunConfig& config);
// Of this rank's layers those that are not multiplied so.
void tell_fp8_layers(const engine::RunConfig& config, engine::RankModel& model);

}  // namespace tessera::train
