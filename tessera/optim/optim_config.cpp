#include "tessera/optim/optim_config.h"

#include <algorithm>

#include "tessera/core/units.h"
#include "tessera/optim/registry.h"

namespace tessera::optim {
namespace {

std::string complaint_about_betas(const config::Value& value) {
  const auto& betas = std::get<std::vector<double>>(value);
  if (!betas.empty() && betas.size() != 2) {
    return "it must be two numbers, as [0.9, 0.95], or none";
  }
  for (double beta : betas) {
    if (!(beta >= 0.0 && beta < 1.0)) return "each must be in [0, 1)";
  }
  return "";
}

}  // namespace

void OptimizerConfig::declare(config::Section& section) {
  std::vector<std::string> known = optimizer_names();
  std::ranges::copy(optimizers_not_built(), std::back_inserter(known));
  section.key("type", type, "how a gradient becomes an update")
      .one_of(known)
      .not_built(optimizers_not_built(), "the optimizer",
                 "one of " + some_of(optimizer_names(), 16));
  section.key("lr", lr, "learning rate after the warm-up")
      .at_least(0)
      .at_most(1e3);
  section
      .key("betas", betas,
           "decay of the first and second moment; []: the optimizer's own")
      .check(complaint_about_betas);
  section.key("eps", eps, "added to the root of the second moment")
      .more_than(0)
      .at_most(1);
  section.key("momentum", momentum, "of sgd").at_least(0).at_most(0.9999999);
  section
      .key("weight_decay", weight_decay,
           "of parameters of two or more dimensions")
      .at_least(0)
      .at_most(1e3);
  section
      .key("clip_norm", clip_norm,
           "global L2 norm that gradients are clipped to; 0: they are not")
      .at_least(0);
  section.key("normalize_grad", normalize_grad,
              "divide gradients by their global L2 norm + 1e-6 at every step, "
              "before they are clipped: a clip_norm of 1 or more then has "
              "nothing to do");
  section.key("skip_nonfinite", skip_nonfinite,
              "a step whose gradient is infinite or no number updates nothing, "
              "and the run goes on; else it ends the run");
}

void OptimizerConfig::complete() {
  if (betas.empty()) betas = update_rule(type).betas;
}

void ScheduleConfig::declare(config::Section& section) {
  section.key("type", type, "of the learning rate over the run")
      .one_of({"constant", "linear", "cosine", "wsd"});
  section.key("warmup", warmup, "steps over which the learning rate grows")
      .at_least(0)
      .at_most(1e12);
  section.key("warmup_type", warmup_type, "how it grows meanwhile")
      .one_of({"linear", "log"});
  section.key("start_lr", start_lr, "learning rate that it grows from")
      .at_least(0)
      .at_most(1e3);
  section.key("min_lr", min_lr, "learning rate that the schedule ends at")
      .at_least(0)
      .at_most(1e3);
  section
      .key("steps", steps,
           "in which it gets there, and where it stays; 0: run.steps")
      .at_least(0)
      .at_most(1e12);
  section
      .key("decay", decay, "of wsd: the share of its steps in which it falls")
      .more_than(0)
      .at_most(1);
  section
      .key("convention", convention,
           "how steps are counted; deepspeed: as DeepSpeed's schedulers do, "
           "which move on behind an update")
      .one_of({"tessera", "deepspeed"});
}

}  // namespace tessera::optim
