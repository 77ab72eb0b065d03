// A loss far above those before it, once a window of them is full.
//
// Robust to the spikes themselves: median and median absolute deviation stand
// for mean and deviation. A level that stays is the new one once it is
// half of the window.
// Threads: one.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "tessera/engine/spike_config.h"

namespace tessera::train {

class SpikeWatch {
 public:
  struct Spike {
    double median = 0;      // of the losses before
    double deviations = 0;  // by which it lies above
    bool is_first = false;  // the loss before was none
  };

  // `losses`: of the steps before, the newest last.
  SpikeWatch(const engine::SpikeConfig& config,
             const std::vector<double>& losses);

  // Each step's, in their order. What is no number does not count.
  std::optional<Spike> add(double loss);
  std::vector<double> losses() const {
    return {losses_.begin(), losses_.end()};
  }

 private:
  std::optional<Spike> compare(double loss) const;
  void keep(double loss);

  engine::SpikeConfig config_;
  std::deque<double> losses_;
  bool is_in_spike_ = false;
};

}  // namespace tessera::train
