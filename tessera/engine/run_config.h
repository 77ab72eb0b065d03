// The whole configuration of a run: all sections, in the order of the manual.
//
//   config::Provenance origins;
//   RunConfig config = read_run_config("run.json", overrides, &origins);
//   read_model_folder(config, origins);  // model_sizes.h
//   complete(config, world_size);
//
// Errors: TS_CHECK_CONFIG, before any rank starts: a message names the keys,
//         their values, the rule and the nearest values that fit.
#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint_config.h"
#include "tessera/comm/comm_config.h"
#include "tessera/core/config.h"
#include "tessera/data/data_config.h"
#include "tessera/engine/batch_config.h"
#include "tessera/engine/spike_config.h"
#include "tessera/mesh/mesh_config.h"
#include "tessera/models/model_config.h"
#include "tessera/monitor/monitor_config.h"
#include "tessera/optim/optim_config.h"
#include "tessera/parallel/parallel_config.h"

namespace tessera::engine {

struct RunSection {
  std::string name = "run";
  std::string dir = "runs";
  int64_t seed = 0;
  int64_t steps = 1000;
  std::string device = "auto";  // one, or one for each stage: "cuda,cpu"
  int64_t threads = 0;          // 0: the cores, shared out among the ranks
  // No key: what `device` is here, of all or by stage.
  std::vector<c10::DeviceType> device_types = {c10::kCPU};
  c10::DeviceType device_of_stage(int64_t stage) const;
  bool is_on_cpu() const;  // all of it
  // As `device` would have them: "cuda", "cuda,cpu".
  std::string device_text() const;
  void declare(config::Section& section);
};

// When a model that trains is measured on held-out data, and what follows.
struct ValidateConfig {
  int64_t every = 0;      // 0: at checkpoints and the end
  int64_t samples = 512;  // the first ones; 0: all
  bool at_start = false;
  int64_t patience = 0;  // 0: the run goes on whatever the loss
  bool ema = false;
  void declare(config::Section& section);
};

// The sections of ParallelConfig, and those of a run.
struct RunConfig : parallel::ParallelConfig {
  RunSection run;
  models::ModelConfig model;
  data::DataConfig data;
  BatchConfig batch;
  mesh::MeshConfig mesh;
  optim::OptimizerConfig optimizer;
  optim::ScheduleConfig schedule;
  ValidateConfig validate;
  SpikeConfig spike;
  comm::CommConfig comm;
  checkpoint::CheckpointConfig checkpoint;
  monitor::MonitorConfig monitor;
  // What is composed with a model.
  const parallel::ParallelConfig& strategies() const { return *this; }
  // The same run with these.
  RunConfig with(const parallel::ParallelConfig& strategies) const {
    RunConfig config = *this;
    static_cast<parallel::ParallelConfig&>(config) = strategies;
    return config;
  }
  void declare(config::Section& section);
};

// The file at `path` and then the overrides; an empty path: the defaults.
// TS_CHECK_IO where the file cannot be read.
RunConfig read_run_config(const std::string& path,
                          const std::vector<config::Override>& overrides = {},
                          config::Provenance* origins = nullptr);
// The same of a run that is planned, for ranks of other hosts and builds:
// comm.backend need not be one of this build.
RunConfig read_planned_config(const std::string& path,
                              const std::vector<config::Override>& overrides,
                              config::Provenance* origins);

// The same from a text, as config.json has it; `source` names it.
RunConfig run_config_from_text(
    const std::string& text, const std::string& source,
    const std::vector<config::Override>& overrides = {},
    config::Provenance* origins = nullptr);

// As a run has saved it, maybe on hosts of another build: `text` of `source`,
// whose comm.backend need not be one of this build either.
RunConfig saved_run_config(const std::string& text, const std::string& source);

// As config.json of the run folder has it.
std::string to_json(const RunConfig& config);

// The ranks that the mesh asks for by itself; degrees that are left open are 1.
int64_t implied_world_size(const RunConfig& config);
// So many ranks as the run has them, in both views. Errors: MeshConfig::mesh().
mesh::DeviceMesh mesh_of(const RunConfig& config, int64_t world_size);
// Its experts are sharded inside each replica of mesh.dp_replicate.
bool shards_experts_by_replica(const RunConfig& config);

// Replaces every value that stands for "what fits" by the value, and checks
// what concerns several sections.
void complete(RunConfig& config, int64_t world_size);
// The same for evaluations alone: model, mesh, devices, the longest sequence,
// and batch.micro sequences at a time.
void complete_for_evaluation(RunConfig& config, int64_t world_size);

// That the learning rate rises to optimizer.lr and falls from it, in as many
// steps as there are.
void check_schedule(const RunConfig& config);

// Micro-batches that a rank accumulates. REQUIRES: a completed configuration.
int64_t accumulation(const RunConfig& config);
// Samples of one, on all data-parallel ranks together.
int64_t samples_of_microbatch(const RunConfig& config);
// Data-parallel ranks do not divide a micro-batch (batch.uneven). REQUIRES: a
// completed configuration.
bool has_uneven_batch(const RunConfig& config);
// What a sum over the step's samples and the layers with experts is multiplied
// by for a mean; 0 where there are none.
double aux_mean(const RunConfig& config);
// Ranks that see other samples. REQUIRES: a completed configuration.
int64_t data_parallel_degree(const RunConfig& config);

// Where zero.offload puts its files: where it says, or in the run's folder.
std::string offload_folder(const RunConfig& config);

}  // namespace tessera::engine
