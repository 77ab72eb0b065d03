// The section mesh of the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/config.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::mesh {

// Not all are alike.
bool differ(const std::vector<double>& speeds);

struct MeshConfig {
  int64_t pp = 1;
  // 0: what the world leaves. `dp` is shorthand: with zero.stage 0 it is
  // dp_replicate, else dp_shard.
  int64_t dp = 0;
  int64_t dp_replicate = 0;
  int64_t dp_shard = 0;
  int64_t cp = 1;
  int64_t tp = 1;
  int64_t ep = 1;
  int64_t etp = 1;
  std::vector<std::string> order = {"pp", "dp_replicate", "dp_shard", "cp",
                                    "tp"};
  std::string data_parallel = "ddp";
  std::vector<double> speeds = {};  // by rank; empty: all alike
  bool measure_speeds = false;
  void declare(config::Section& section);

  // The key of an axis.
  int64_t& degree(Axis axis);
  int64_t degree(Axis axis) const;
  // Ranks that hold one replica of the model, all stages together.
  int64_t ranks_of_model() const;
  // Devices are threads of one process, the only rank, around device 0.
  bool star() const { return data_parallel == "dp"; }
  bool uneven() const { return differ(speeds); }
  // Relative to the others'.
  double speed_of(int64_t rank) const {
    return speeds.empty() ? 1 : speeds.at(rank);
  }
  // Every axis with its degree: what is 0 takes what the others leave of
  // `world_size`. TS_CHECK_CONFIG where `dp` contradicts its two axes.
  Degrees degrees(int64_t world_size, int64_t zero_stage) const;
  // Also TS_CHECK_CONFIG, with all factors named, where their product is not
  // the world. `experts_by_replica`: their view keeps the replicas of
  // dp_replicate apart.
  DeviceMesh mesh(int64_t world_size, int64_t zero_stage,
                  bool experts_by_replica = false) const;
};

// The keys of this section that say who is where: "mesh.pp", ...
std::vector<std::string> keys_of_degrees();

}  // namespace tessera::mesh
