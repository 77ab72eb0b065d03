#include "tessera/train/spike_watch.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "tessera/train/median.h"

namespace tessera::train {
namespace {

// A normal distribution's deviation over its median absolute deviation.
constexpr double kOfNormal = 1.4826;
// Of the median, and in nats: losses that are quiet, or of what is learned by
// heart, would be spikes by next to nothing.
constexpr double kLeastPart = 0.01, kLeast = 1e-3;

}  // namespace

SpikeWatch::SpikeWatch(const engine::SpikeConfig& config,
                       const std::vector<double>& losses)
    : config_(config) {
  if (config.action == "none") return;
  for (const double loss : losses) keep(loss);
}

std::optional<SpikeWatch::Spike> SpikeWatch::add(double loss) {
  if (!std::isfinite(loss) || config_.action == "none") return std::nullopt;
  auto spike = compare(loss);
  if (spike) spike->is_first = !is_in_spike_;
  is_in_spike_ = spike.has_value();
  keep(loss);
  return spike;
}

std::optional<SpikeWatch::Spike> SpikeWatch::compare(double loss) const {
  if (std::ssize(losses_) < config_.window) return std::nullopt;
  const std::vector<double> before = losses();
  const double median = lower_median(before);
  std::vector<double> distances;
  for (const double each : before) distances.push_back(std::abs(each - median));
  const double deviation = std::max({kOfNormal * lower_median(distances),
                                     kLeastPart * std::abs(median), kLeast});
  const double deviations = (loss - median) / deviation;
  if (!(deviations > config_.deviations)) return std::nullopt;
  return Spike{.median = median, .deviations = deviations};
}

void SpikeWatch::keep(double loss) {
  losses_.push_back(loss);
  if (std::ssize(losses_) > config_.window) losses_.pop_front();
}

}  // namespace tessera::train
