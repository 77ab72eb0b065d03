#include "tessera/optim/optim_config.h"

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

// -1 leaves it to the optimizer.
std::string complaint_about_own(const config::Value& value) {
  const double number = std::get<double>(value);
  return number == -1 || number >= 0 ? "" : "it must be at least 0, or -1";
}

}  // namespace

void ParameterGroup::declare(config::Section& section) {
  section
      .key("match", match,
           "globs over names of parameters, as checkpoints have them behind "
           "\"model.\"; of groups that match one the first counts")
      .check([](const config::Value& value) -> std::string {
        return std::get<std::vector<std::string>>(value).empty()
                   ? "it names no parameter: give a glob, as \"*.bias\""
                   : "";
      });
  section
      .key("lr", lr,
           "in the place of optimizer.lr, scaled by the schedule as that is; "
           "-1: that")
      .check(complaint_about_own)
      .at_most(1e3);
  section
      .key("weight_decay", weight_decay,
           "of all parameters of the group; -1: as without it")
      .check(complaint_about_own)
      .at_most(1e3);
  section.key("betas", betas, "[]: optimizer.betas")
      .check(complaint_about_betas);
}

void MuonConfig::declare(config::Section& section) {
  section.key("momentum", momentum, "of hidden matrices")
      .at_least(0)
      .at_most(0.9999999);
  section.key("nesterov", nesterov, "the momentum of the step ahead");
  section.key("steps", steps, "of Newton and Schulz").at_least(1).at_most(99);
  section.key("eps", eps, "the least norm that a matrix is divided by")
      .more_than(0)
      .at_most(1);
  section
      .key("adjust_lr", adjust_lr,
           "of a matrix (m, n): original: sqrt(max(1, m / n)); "
           "match_rms_adamw: 0.2 sqrt(max(m, n)), for AdamW's rates")
      .one_of({"original", "match_rms_adamw"});
  section
      .key("dtype", dtype,
           "that matrices are orthogonalised in; auto: precision.compute, of "
           "fp16 bf16")
      .one_of({"auto", "bf16"});
  section
      .key("adamw_lr", adamw_lr,
           "of all that is no hidden matrix; 0: optimizer.lr")
      .at_least(0)
      .at_most(1e3);
}

void OptimizerConfig::declare(config::Section& section) {
  section.key("type", type, "how a gradient becomes an update")
      .one_of(optimizer_names());
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
  section.key("momentum", momentum, "of sgd; muon has its own")
      .at_least(0)
      .at_most(0.9999999);
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
  section
      .key("state_dtype", state_dtype,
           "that moments are kept in; auto: that of the weights that are "
           "updated, fp32 beside bf16")
      .one_of({"auto", "fp32", "bf16"});
  section
      .key("ema", ema,
           "decay of an average of the weights over the steps, which "
           "checkpoints hold; 0: none")
      .at_least(0)
      .at_most(0.9999999);
  section.section("muon", muon, "what optimizer.type muon alone uses");
  section.objects("groups", groups,
                  "parameters with a learning rate, a weight decay or betas "
                  "of their own");
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
