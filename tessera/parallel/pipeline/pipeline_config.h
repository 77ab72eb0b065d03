// The section pipeline of the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/config.h"
#include "tessera/program/placement.h"
#include "tessera/program/units.h"

namespace tessera::parallel::pipeline {

struct PipelineConfig {
  std::string schedule = "1f1b";
  int64_t chunks = 0;               // 0: as many as the schedule needs
  std::vector<int64_t> split = {};  // layers of each part; empty: even
  // "layers", "facts", or the folder of a run whose steps were traced.
  std::string cut = "layers";
  std::string order = "reverse";  // of gpipe's backwards

  // No key: the split is nobody's wish, but what `cut` and speeds led to.
  bool is_split_chosen = false;
  // No keys: what the run that `cut` names has shown, for who is told: by unit
  // the seconds of a micro-batch at speed 1, and ranks' speeds where it was not
  // known that they differ.
  std::vector<double> seconds_seen = {}, speeds_seen = {};

  bool cuts_by_run() const { return cut != "layers" && cut != "facts"; }
  int64_t num_chunks() const;
  program::Placement placement() const;
  // Of a step's, those that go through each unit: two replicas share them.
  int64_t batches_of_a_unit(int64_t micro_batches) const;
  // Of p ranks: where its virtual stages lie.
  program::Pipeline pipeline(int64_t stages) const;
  // Gradients are taken at the weights of one update before.
  bool delayed() const;
  // Of what is trained, on stage `stage` of so many.
  program::Versions versions(int64_t stages, int64_t stage) const;
  void declare(config::Section& section);
};

}  // namespace tessera::parallel::pipeline
