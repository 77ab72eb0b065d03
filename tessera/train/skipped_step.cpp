#include "tessera/train/skipped_step.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/engine/sample_shares.h"
#include "tessera/train/compute_again.h"

namespace tessera::train {

namespace {

constexpr size_t kNamedAtMost = 16;  // samples, parameters

struct Origin {
  std::string parameter;
  int64_t microbatch = 0;
};

bool is_finite(const at::Tensor& gradient) {
  return at::isfinite(gradient).all().item<bool>();
}

// As this rank's own backwards left them.
std::optional<Origin> find_origin(engine::RankModel& model,
                                  engine::StepInput input) {
  std::optional<Origin> found;
  input.scale = model.actor().scale();  // it may be another one since
  compute_again(model, std::move(input),
                [&](const std::string& parameter, int64_t microbatch,
                    const at::Tensor& gradient) {
                  if (found || is_finite(gradient)) return;
                  found = {parameter, microbatch};
                });
  return found;
}

std::string samples_text(const std::vector<int64_t>& samples) {
  std::vector<std::string> numbers;
  for (const int64_t sample : samples) {
    numbers.push_back(std::to_string(sample));
  }
  return (samples.size() == 1 ? "sample " : "samples ") +
         some_of(numbers, kNamedAtMost) + " of the training data";
}

}  // namespace

void tell_of_skipped_step(engine::ModelActor& actor, int64_t step,
                          int64_t skipped) {
  const optim::LossScale& scale = actor.loss_scale();
  const std::string at =
      scale.scales() ? c10::str(" at loss scale ", actor.scale()) : "";
  const std::string now =
      scale.value() != actor.scale()
          ? c10::str("; the loss scale is ", scale.value(), " now")
          : "";
  log::warning("step ", step, " is skipped: the gradient's norm is ",
               actor.grad_norm(), at, ". Nothing was updated", now,
               ". Skipped so far: ", skipped);
}

void name_nonfinite(const engine::RunConfig& config, engine::RankModel& model,
                    const data::Dataset& data, comm::Group& world, int64_t step,
                    engine::StepInput input) {
  const auto origin = find_origin(model, std::move(input));
  const at::Tensor is_known = at::full({1}, origin ? 1 : 0, at::kDouble);
  if (world.size() > 1) world.all_reduce(is_known).synchronize();
  const auto& sampler = data.sampler();
  if (origin) {
    const auto samples = engine::SampleShares(config).of(
        model.composed().data->rank(), origin->microbatch);
    log::warning("step ", step + 1, ": not finite first in the gradient of '",
                 origin->parameter, "', behind micro-batch ",
                 origin->microbatch, ": ",
                 samples_text(sampler.sample_indices(step, samples.first,
                                                     samples.count)));
    return;
  }
  if (is_known.item<double>() > 0) return;
  // Devices of one process, and what only a sum over ranks makes infinite.
  const auto names = model.actor().nonfinite_parameters();
  at::Tensor num_named =
      at::full({1}, static_cast<double>(names.size()), at::kDouble);
  if (world.size() > 1) world.all_reduce(num_named).synchronize();
  if (world.rank() == 0 && num_named.item<double>() == 0) {
    log::warning("step ", step + 1,
                 std::isfinite(model.actor().grad_norm())
                     ? ": once more, its gradient is finite. A processor or "
                       "memory may have failed."
                     : ": a loss is not finite, and every gradient is.");
  }
  if (names.empty()) return;
  log::warning("step ", step + 1,
               ": not finite, once summed up, in the gradient of ",
               some_of(names, kNamedAtMost), ": ",
               samples_text(sampler.sample_indices(step)));
}

}  // namespace tessera::train
