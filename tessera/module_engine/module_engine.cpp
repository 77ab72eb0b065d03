#include "tessera/module_engine/module_engine.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/host.h"
#include "tessera/core/log.h"
#include "tessera/engine/kept_states.h"
#include "tessera/engine/rank_model.h"
#include "tessera/module_engine/detail/client_state.h"
#include "tessera/module_engine/detail/module_parts.h"
#include "tessera/module_engine/detail/module_settings.h"
#include "tessera/module_engine/detail/module_state.h"
#include "tessera/module_engine/detail/module_updates.h"
#include "tessera/nn/wide_type.h"
#include "tessera/optim/gradient_norm.h"
#include "tessera/optim/loss_scale.h"
#include "tessera/optim/schedule.h"
#include "tessera/wrappers/moe.h"

namespace tessera {

using wrappers::ParameterShard;

namespace {

void require_masters(const torch::nn::Module& module) {
  for (const auto& parameter : module.named_parameters()) {
    const at::ScalarType type = parameter.value().scalar_type();
    TS_CHECK_CONFIG(type == at::kFloat || type == at::kDouble,
                    "initialize: ", parameter.key(), " is of type ", type,
                    ", and bf16 or fp16 is enabled: give the module in fp32, "
                    "which its masters are then.");
  }
}

FullyShardOptions options_of(torch::nn::Module& module,
                             const detail::ModuleSettings& settings,
                             const InitializeOptions& options) {
  check_experts(module, settings);
  const engine::RunConfig& config = settings.config;
  FullyShardOptions found{
      .zero_stage = config.zero.stage,
      .expert_stage = config.zero.expert_stage,
      .units = options.units,
      .reshard_after_forward = config.zero.reshard_after_forward,
      .prefetch = config.zero.prefetch,
      .deferred = options.deferred,
      .deferred_values = options.deferred_values};
  if (c10::isReducedFloatingType(config.precision.compute_dtype())) {
    require_masters(module);
    found.compute_dtype = config.precision.compute_dtype();
  }
  if (config.precision.reduce != "auto") {
    found.reduce_dtype = config.precision.gradient_dtype();
  }
  return found;
}

optim::LossScaleRule loss_scale_rule(const detail::ModuleSettings& settings) {
  optim::LossScaleRule rule =
      engine::loss_scale_rule(settings.config.precision);
  rule.words = {.who = "initialize",
                .floor = "fp16.min_loss_scale",
                .way_out =
                    "A smaller lr of the optimizer, a longer warm-up of "
                    "the scheduler, or bf16 in the place of fp16 may "
                    "help."};
  return rule;
}

// Ranks of this host before this one.
int64_t local_rank_of(comm::Communicator& ranks) {
  at::Tensor mine =
      at::full({1}, static_cast<int64_t>(hash64(host_identity())), at::kLong);
  at::Tensor all = at::empty({ranks.world_size()}, at::kLong);
  ranks.world().all_gather(all, mine).synchronize();
  return (all.narrow(0, 0, ranks.rank()) == mine).sum().item<int64_t>();
}

}  // namespace

struct ModuleEngine::Impl {
  // Of two, one is there.
  Impl(torch::nn::Module& of, const std::string& json,
       std::optional<StartedRanks> own, comm::Communicator* others,
       const InitializeOptions& options)
      : started(std::move(own)),
        module(of),
        ranks(started ? started->ranks() : *others),
        local_rank(started ? started->local_rank() : local_rank_of(ranks)),
        settings(detail::module_settings(json, ranks.world_size(), options)),
        sharding(options_of(of, settings, options)),
        embeddings(detail::embedding_names(of)),
        core(of, settings.mesh, ranks, sharding),
        parts({{&of, core.shards()}}, ranks.world()),
        shards(parts.shards()),
        loss_scale(loss_scale_rule(settings)),
        updates(shards, settings, options.hidden_matrices, embeddings, ranks) {
    if (ranks.rank() > 0) return;
    for (const auto& note : settings.notes) log::info(note);
    for (const auto& warning : settings.warnings) log::warning(warning);
  }

  const optim::OptimizerConfig& rule() const {
    return settings.config.optimizer;
  }
  double lr() const;
  void update();
  void swap_averages();
  void require_parameters(const char* call) const {
    TS_CHECK(!is_averaged, call, " while averaged()'s result lives.");
  }
  checkpoint::State state();
  void check(const std::string& extra, const std::string& where) const;

  std::optional<StartedRanks> started;  // gone last
  torch::nn::Module& module;
  comm::Communicator& ranks;
  const int64_t local_rank;
  const detail::ModuleSettings settings;
  const FullyShardOptions sharding;
  const std::set<std::string> embeddings;
  wrappers::FullyShardedCore core;
  const detail::ModuleParts parts;
  const std::vector<ParameterShard>& shards;
  optim::LossScale loss_scale;
  optim::Standstill standstill{settings.config.precision.scale_hysteresis};
  detail::ModuleUpdates updates;
  int64_t global_steps = 0;
  int64_t skipped_steps = 0;  // of these
  int64_t micro_steps = 0;    // of the batch, that step() has seen
  bool went_back = false;     // and step() has not seen it
  bool is_averaged = false;   // averaged()'s result lives
  double norm = 0;
};

double ModuleEngine::Impl::lr() const {
  return optim::lr_at({global_steps - skipped_steps, settings.config.run.steps},
                      rule().lr, settings.config.schedule);
}

// The norm over all ranks is what tells each of them whether to skip.
void ModuleEngine::Impl::update() {
  const at::NoGradGuard no_grad;
  const auto& segments = updates.optimizer().segments();
  for (const auto& segment : segments) {
    const at::Tensor parameter = segment.parameter;
    if (parameter.grad().defined()) continue;
    parameter.mutable_grad() = at::zeros_like(parameter);
  }
  const double scale = loss_scale.value();
  norm = core.clip_grad_norm(std::numeric_limits<double>::infinity()) / scale;
  const bool is_finite = std::isfinite(norm);
  TS_CHECK(is_finite || loss_scale.scales() || rule().skip_nonfinite, "update ",
           global_steps + 1, ": the gradients' norm is ", norm,
           ". Lower the learning rate, clip, or look at this batch.");
  if (is_finite) {
    const optim::GradientScaling scaling{rule().clip_norm,
                                         rule().normalize_grad};
    updates.step(lr(), scaling.of(norm) / scale);
    balance_experts(module);
  } else {
    ++skipped_steps;
    forget_loads(module);
  }
  for (const auto& segment : segments) {
    segment.parameter.mutable_grad() = at::Tensor();
  }
  ++global_steps;
  loss_scale.update(is_finite);
  if (is_finite) return standstill.updated();
  standstill.skipped(loss_scale.value() != scale);
  TS_CHECK(!standstill.is_too_long(), "update ", global_steps, " is the ",
           standstill.in_a_row(),
           "th in a row that changed nothing, its gradients' norm ", norm,
           ": what would train on is lost. Go on from an earlier checkpoint "
           "with a lower learning rate, or another loss scale.");
}

// Before the first update the averages are what the parameters are.
void ModuleEngine::Impl::swap_averages() {
  if (updates.optimizer().steps() > 0) updates.optimizer().swap_averages();
  is_averaged = !is_averaged;
}

checkpoint::State ModuleEngine::Impl::state() {
  const bool is_first = ranks.rank() == 0;
  checkpoint::State state{parts.entries(), ""};
  std::map<std::string, const ParameterShard*> by_name;
  for (const auto& shard : shards) by_name[shard.name] = &shard;
  for (const auto& item : updates.optimizer().state()) {
    const std::string name = "optimizer." + item.name;
    state.tensors.push_back(
        item.parameter.empty()
            ? detail::common_entry(name, item.tensor, is_first)
            : detail::entry_of(name, *by_name.at(item.parameter), item.tensor));
  }
  return state;
}

// That a checkpoint which says this is an engine's, and keeps what this one
// does.
void ModuleEngine::Impl::check(const std::string& extra,
                               const std::string& where) const {
  const detail::Json json = detail::parse_json(extra, where);
  for (const char* key : {"step", "skipped", "scale", "finite_in_a_row",
                          "hysteresis_left", "client_state"}) {
    TS_CHECK_IO(json.contains(key), where, ": the key ", key,
                " is missing; this is no checkpoint of initialize()'s engine.");
  }
  if (!json.contains("optimizer")) return;  // of an older version
  const std::string masters =
      shards.empty() || shards[0].values.scalar_type() == at::kFloat ? "fp32"
                                                                     : "fp64";
  const auto others = engine::other_states(
      {engine::optimizer_from(json["optimizer"].dump(), where), masters},
      {rule(), masters});
  TS_CHECK_CONFIG(
      others.empty(), where,
      " holds other states than this engine keeps: ", c10::Join("; ", others),
      ". Go on with the checkpoint's values, in DeepSpeed's file "
      "or in settings.");
}

mesh::DeviceMesh mesh_of(const std::string& json, int64_t world_size,
                         const InitializeOptions& options) {
  return detail::module_settings(json, world_size, options).mesh;
}

ModuleEngine::ModuleEngine(torch::nn::Module& module, const std::string& json,
                           comm::Communicator& ranks,
                           const InitializeOptions& options)
    : impl_(std::make_unique<Impl>(module, json, std::nullopt, &ranks,
                                   options)) {}

ModuleEngine::ModuleEngine(torch::nn::Module& module, const std::string& json,
                           StartedRanks ranks, const InitializeOptions& options)
    : impl_(std::make_unique<Impl>(module, json, std::move(ranks), nullptr,
                                   options)) {}

ModuleEngine::~ModuleEngine() = default;
ModuleEngine::ModuleEngine(ModuleEngine&&) noexcept = default;

void ModuleEngine::backward(const at::Tensor& loss) {
  Impl& self = *impl_;
  self.require_parameters("backward()");
  TS_CHECK(!self.went_back,
           "backward() twice without a step() between: step() follows every "
           "backward, also where gradients accumulate.");
  TS_CHECK(loss.numel() == 1, "backward() of a loss of shape ", loss.sizes(),
           ": it must be one number, the mean over the micro-batch.");
  // Scaled, it may be more than fp16 holds.
  const at::Tensor wide = loss.to(nn::wide_type(loss));
  const at::Tensor share =
      wide * (self.loss_scale.value() /
              static_cast<double>(self.settings.accumulation));
  if (is_gradient_accumulation_boundary()) {
    self.core.backward(share);
  } else {
    self.core.accumulate(share);
  }
  self.went_back = true;
}

void ModuleEngine::step() {
  Impl& self = *impl_;
  TS_CHECK(self.went_back, "step() without a backward() before it.");
  self.went_back = false;
  if (is_gradient_accumulation_boundary()) {
    self.update();
    self.micro_steps = 0;
  } else {
    ++self.micro_steps;
  }
}

bool ModuleEngine::is_gradient_accumulation_boundary() const {
  return impl_->micro_steps + 1 == impl_->settings.accumulation;
}

int64_t ModuleEngine::rank() const { return impl_->ranks.rank(); }
int64_t ModuleEngine::local_rank() const { return impl_->local_rank; }
int64_t ModuleEngine::world_size() const { return impl_->ranks.world_size(); }
int64_t ModuleEngine::train_batch_size() const {
  return impl_->settings.config.batch.global;
}
int64_t ModuleEngine::train_micro_batch_size_per_gpu() const {
  return impl_->settings.config.batch.micro;
}
int64_t ModuleEngine::gradient_accumulation_steps() const {
  return impl_->settings.accumulation;
}
int64_t ModuleEngine::zero_optimization_stage() const {
  return impl_->sharding.zero_stage;
}
int64_t ModuleEngine::global_steps() const { return impl_->global_steps; }
int64_t ModuleEngine::skipped_steps() const { return impl_->skipped_steps; }
double ModuleEngine::loss_scale() const { return impl_->loss_scale.value(); }
double ModuleEngine::lr() const { return impl_->lr(); }
double ModuleEngine::global_grad_norm() const { return impl_->norm; }
const std::string& ModuleEngine::config() const { return impl_->settings.text; }
std::vector<ParameterShard> ModuleEngine::shards() const {
  return impl_->shards;
}
AveragedParameters ModuleEngine::averaged() {
  Impl& self = *impl_;
  self.require_parameters("averaged()");
  TS_CHECK(!self.went_back, "averaged() between a backward() and its step().");
  TS_CHECK_CONFIG(self.rule().ema > 0,
                  "averaged(): no averages are kept. Give initialize() "
                  "settings {{\"optimizer.ema\", \"0.999\"}}.");
  self.swap_averages();
  return AveragedParameters([&self] { self.swap_averages(); });
}

wrappers::FullyShardedCore& ModuleEngine::core() { return impl_->core; }

void ModuleEngine::save_checkpoint(const std::string& folder,
                                   const std::string& client_state) {
  Impl& self = *impl_;
  self.require_parameters("save_checkpoint()");
  TS_CHECK(!self.went_back && self.micro_steps == 0,
           "save_checkpoint() with gradients that are not in any update: save "
           "behind the step() that updates.");
  detail::check_client_state(client_state);
  comm::compare_calls(self.ranks);  // of ranks out of step nothing is kept
  checkpoint::State state = self.state();
  auto extra = detail::Json::parse(engine::to_json(self.loss_scale.state()));
  extra["optimizer"] = detail::Json::parse(engine::to_json(self.rule()));
  extra["step"] = self.global_steps;
  extra["skipped"] = self.skipped_steps;
  extra["client_state"] = client_state;
  state.extra = extra.dump();
  checkpoint::save(folder, self.global_steps, state, self.ranks.world(),
                   {.keep = 0, .mesh = self.settings.mesh.describe()});
}

std::optional<std::string> ModuleEngine::load_checkpoint(
    const std::string& folder) {
  Impl& self = *impl_;
  self.require_parameters("load_checkpoint()");
  TS_CHECK(!self.went_back && self.micro_steps == 0,
           "load_checkpoint() in the middle of a batch.");
  checkpoint::State state = self.state();
  const auto told = [&](const std::string& where, const std::string& extra,
                        checkpoint::State&) { self.check(extra, where); };
  if (!detail::load_from(folder, state, self.ranks.world(), {.told = told})) {
    return std::nullopt;
  }
  const detail::Json json = detail::parse_json(state.extra, folder);
  const auto number = [&](const char* key) {
    return detail::as_int(json[key], c10::str(folder, ": ", key));
  };
  self.global_steps = number("step");
  self.skipped_steps = number("skipped");
  self.loss_scale.go_on(engine::loss_scale_from(state.extra, folder));
  return detail::as_string(json["client_state"], folder + ": client_state");
}

}  // namespace tessera
