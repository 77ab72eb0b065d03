#include "tessera/verify/verify.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/engine/model_cut.h"
#include "tessera/engine/reader.h"
#include "tessera/engine/run_devices.h"
#include "tessera/engine/step_programs.h"
#include "tessera/engine/update_config.h"
#include "tessera/models/adapters.h"
#include "tessera/models/family.h"
#include "tessera/optim/parameter_groups.h"
#include "tessera/program/schedules/file.h"
#include "tessera/verify/detail/comparison.h"

namespace tessera::verify {

using engine::RunConfig;
using mesh::Axis;

namespace {

using detail::Control;
using detail::Probe;

// One rank needs none; but what is computed depends on its delays.
parallel::pipeline::PipelineConfig without_stages(
    const parallel::pipeline::PipelineConfig& pipeline) {
  if (!pipeline.delayed()) return {};
  return {.schedule = pipeline.schedule};
}

// A balance over micro-batches wants the mesh's: one rank has these where each
// is a run of samples.
void check_microbatches(const RunConfig& config) {
  const auto& balance = config.model.moe.balance;
  const int64_t degree = data_parallel_degree(config);
  const int64_t share = at::ceil_div(config.batch.global, degree);
  TS_CHECK_CONFIG(
      balance == "sample" || accumulation(config) == 1 || degree == 1,
      "model.moe.balance ", balance,
      " is over the samples of a micro-batch, "
      "which on ",
      degree, " data-parallel ranks, ", accumulation(config),
      " times a step, are others than on one rank: there "
      "is nothing to compare with. Use batch.micro ",
      share, ", or model.moe.balance sample.");
}

RunConfig on_one_rank(RunConfig config) {
  config.batch.micro = config.model.moe.balance == "sample"
                           ? config.batch.global  // nothing is accumulated
                           : samples_of_microbatch(config);
  config.run.device_types = {c10::kCPU};
  const auto order = config.mesh.order;
  config.mesh = {};
  config.mesh.dp = config.mesh.dp_replicate = config.mesh.dp_shard = 1;
  config.mesh.order = order;
  config.zero = {};
  config.tensor = {};
  config.pipeline = without_stages(config.pipeline);
  config.recompute = {};
  config.batch.rows = {};
  return config;
}

// The same without one thing that a configuration has; nothing where it has it
// not, or cannot be without.
using Without = std::optional<RunConfig>;

Without without_axis(RunConfig config, Axis axis) {
  mesh::MeshConfig& mesh = config.mesh;
  if (mesh.degree(axis) == 1) return {};
  const int64_t samples = samples_of_microbatch(config);
  mesh.degree(axis) = 1;
  mesh.dp = 0;
  mesh.speeds = {};  // they were of other ranks
  config.batch.rows = {};
  if (mesh.pp == 1) config.pipeline = without_stages(config.pipeline);
  if (mesh.tp == 1) {
    config.tensor = {};
    mesh.etp = 1;
  }
  // What is left of the ranks that ep folds.
  const int64_t replicas =
      shards_experts_by_replica(config) ? mesh.dp_replicate : 1;
  mesh.ep = std::gcd(
      mesh.ep, implied_world_size(config) / mesh.pp / mesh.etp / replicas);
  if (config.batch.uneven) {
    const int64_t degree = data_parallel_degree(config);
    config.batch.micro = at::ceil_div(samples, degree);
    engine::share_out(config, mesh_of(config, implied_world_size(config)));
  }
  return config;
}

Without without_speeds(RunConfig config) {
  const int64_t share = config.batch.micro * data_parallel_degree(config);
  if (config.batch.rows.empty() || config.batch.global % share != 0) return {};
  config.batch.rows = {};
  return config;
}

Without without_zero(RunConfig config) {
  if (config.zero.stage == 0 && config.zero.stage_of_experts() == 0) return {};
  config.zero = {.offload = config.zero.offload,
                 .offload_folder = config.zero.offload_folder};
  const bool is_built = config.run.is_on_cpu() || !why_not_on_gpus(config);
  if (!is_built) config.zero.offload = "optimizer";
  config.mesh.dp = 0;
  config.mesh.dp_replicate *= config.mesh.dp_shard;
  config.mesh.dp_shard = 1;
  return config;
}

Without without_expert_shard(RunConfig config) {
  if (!shards_experts_by_replica(config)) return {};
  config.zero.expert_shard = "all";
  return config;
}

Without without_offload(RunConfig config) {
  if (!config.zero.offloads()) return {};
  config.zero.offload = "none";
  return config;
}

Without without_sequence_parallel(RunConfig config) {
  if (!config.tensor.sequence_parallel) return {};
  config.tensor = {};
  return config;
}

Without without_recompute(RunConfig config) {
  if (config.recompute.mode == "none") return {};
  config.recompute = {};
  return config;
}

Without without_reader(RunConfig config) {
  if (!engine::reads_for_others(config)) return {};
  config.data.reader = "every";
  return config;
}

// A pipeline lives by its micro-batches.
Without without_accumulation(RunConfig config) {
  if (accumulation(config) == 1 || config.mesh.pp > 1) return {};
  if (config.model.moe.balance != "sample") return {};
  const int64_t count = accumulation(config);
  config.batch.micro *= count;
  for (int64_t& rows : config.batch.rows) rows *= count;
  return config;
}

std::vector<std::pair<std::string, Without>> withouts(const RunConfig& config) {
  std::vector<std::pair<std::string, Without>> all;
  // The factors of the world, and what experts fold them into.
  std::vector<Axis> axes(mesh::kAxes.begin(), mesh::kAxes.end());
  axes.insert(axes.end(), {Axis::kEp, Axis::kEtp});
  for (Axis axis : axes) {
    all.emplace_back(mesh::name_of(axis), without_axis(config, axis));
  }
  all.emplace_back("speeds", without_speeds(config));
  all.emplace_back("zero", without_zero(config));
  all.emplace_back("expert_shard", without_expert_shard(config));
  all.emplace_back("offload", without_offload(config));
  all.emplace_back("sequence_parallel", without_sequence_parallel(config));
  all.emplace_back("recompute", without_recompute(config));
  all.emplace_back("reader", without_reader(config));
  all.emplace_back("accumulation", without_accumulation(config));
  return all;
}

// The same without one pass that has a choice.
std::vector<std::pair<std::string, Probe>> without_passes(
    const RunConfig& config, const Probe& probe) {
  std::vector<std::pair<std::string, Probe>> all;
  for (const auto& pass : program::passes::all()) {
    // One that nobody asked for may run where rows wait.
    const auto& left_out = probe.passes.without;
    if (!engine::can_be_without(config, pass) ||
        std::ranges::count(left_out, pass.name) > 0) {
      continue;
    }
    all.emplace_back(pass.name, probe);
    all.back().second.passes.without.emplace_back(pass.name);
  }
  return all;
}

using Names = std::set<std::pair<std::string, std::string>>;

Names differing(const RunConfig& config, const Control& control,
                const Probe& probe) {
  Names names;
  for (const auto& each :
       detail::compare(config, implied_world_size(config), control, probe)
           .differences) {
    names.emplace(each.parameter, each.what);
  }
  return names;
}

// Of the factors of the world, one.
Without with_axis_alone(RunConfig config, Axis axis) {
  if (config.mesh.degree(axis) == 1) return {};
  for (Axis other : mesh::kAxes) {
    if (other == axis) continue;
    if (auto without = without_axis(config, other)) config = *without;
  }
  return config;
}

// Names that without which a difference goes away; where several things cause
// it, each of which suffices, these.
void blame(const RunConfig& config, const Control& control, const Probe& probe,
           std::vector<Difference>& differences) {
  const auto suspect = [&](const std::string& name, const Names& left) {
    for (auto& each : differences) {
      if (!left.contains({each.parameter, each.what})) {
        each.axes.push_back(name);
      }
    }
  };
  for (const auto& [name, without] : withouts(config)) {
    if (without) suspect(name, differing(*without, control, probe));
  }
  for (const auto& [name, other] : without_passes(config, probe)) {
    suspect(name, differing(config, control, other));
  }
  if (!differences.front().axes.empty()) return;
  for (Axis axis : mesh::kAxes) {
    const auto alone = with_axis_alone(config, axis);
    if (!alone) continue;
    const Names left = differing(*alone, control, probe);
    for (auto& each : differences) {
      if (!left.contains({each.parameter, each.what})) continue;
      each.axes.emplace_back(mesh::name_of(axis));
      each.each_alone = true;
    }
  }
}

// A step that differs though all before it, and the weights that they left, are
// equal: some parameter is used wrongly, which its first value hid (a bias that
// is zero). Changed alone, in a first step, it shows itself.
void find_uses(const RunConfig& one, const RunConfig& config,
               int64_t world_size, const program::passes::Choice& passes,
               const Control& seen, std::vector<Difference>& differences) {
  std::set<std::string> kinds;
  for (const auto& [name, tensors] : seen.before)
    kinds.insert(detail::kind_of(name));
  std::vector<Difference> uses;
  for (const auto& kind : kinds) {
    const Probe probe{.steps = 1, .nudged = kind, .passes = passes};
    const Control control = detail::record(one, probe);
    auto found = detail::compare(config, world_size, control, probe);
    if (found.equal()) continue;
    found.differences.resize(1);
    blame(config, control, probe, found.differences);
    Difference use = std::move(found.differences.front());
    use.parameter = kind;
    use.what = "use";
    uses.push_back(std::move(use));
  }
  differences.insert(differences.begin(), uses.begin(), uses.end());
}

// The smallest size of at least `at_least` that leaves the same rest by
// `modulus`.
int64_t shrink(int64_t size, int64_t modulus, int64_t at_least) {
  if (size <= at_least) return size;
  const int64_t rest = size % modulus;
  int64_t smaller = at_least - at_least % modulus + rest;
  if (smaller < at_least) smaller += modulus;
  return std::min(size, smaller);
}

// Fewer samples, in fewer micro-batches of as many that ranks do not divide.
// `keeps_count`: a schedule in a file is of so many micro-batches.
void shrink_batch(engine::BatchConfig& batch, int64_t degree, int64_t stages,
                  bool keeps_count) {
  const int64_t count = batch.microbatches(degree);
  const int64_t missing = batch.micro * degree - batch.global / count;
  engine::BatchConfig smaller = batch;
  smaller.micro = std::min<int64_t>(batch.micro, 2);
  const int64_t samples = smaller.micro * degree - missing;
  for (int64_t fewer = keeps_count ? count : shrink(count, stages, 2 * stages);
       fewer <= count; fewer += stages) {
    smaller.global = samples * fewer;
    if (smaller.microbatches(degree) != fewer) continue;  // cut otherwise
    batch = std::move(smaller);
    return;
  }
}

}  // namespace

std::string Difference::describe() const {
  std::string axis;
  const char* const between = each_alone ? " and over " : " or ";
  for (const auto& name : axes) axis += (axis.empty() ? "" : between) + name;
  if (axis.empty()) axis = "no single axis";
  const std::string end = (place.empty() ? "" : " (at " + place + ")") +
                          " [step " + std::to_string(step) + "]";
  if (what == "parameter") {
    return parameter + ": the layers see another value than was trained: a " +
           "gather is missing or stale, over " + axis + "?" + end;
  }
  if (what == "use") {
    return parameter + ": once it is not what it was at first, the step is " +
           "another: used twice, or not everywhere, over " + axis + "?" + end;
  }
  std::string text = (parameter.empty() ? "" : parameter + ": ") + what + " ";
  char number[64];
  const double inverse = factor != 0 ? 1 / factor : 0;
  if (factor > 1 + 1e-6) {
    std::snprintf(number, sizeof(number), "%.3f times too large", factor);
    text += number;
    text += std::abs(factor - 2) < 1e-6
                ? ": summed twice over " + axis + "?"
                : ": summed too often, or not divided, over " + axis + "?";
  } else if (factor > 0 && inverse > 1 + 1e-6) {
    std::snprintf(number, sizeof(number), "%.3f times too small", inverse);
    text += number;
    text += ": divided, or not summed, over " + axis + "?";
  } else if (factor < 0) {
    std::snprintf(number, sizeof(number), "%.3f times what it should be",
                  factor);
    text += number;
    text += ": " + axis + "?";
  } else {
    std::snprintf(number, sizeof(number), "off by %.2e of its norm", relative);
    text += number;
    text += ": a part is missing, or another's, over " + axis + "?";
  }
  return text + end;
}

Verification verify(const RunConfig& config, int64_t world_size, int64_t steps,
                    const std::string& precision) {
  RunConfig wide = config;
  // Its loss is scaled as it would be.
  wide.precision.compute = precision;
  wide.precision.products = "same";
  wide.precision.reduce = "auto";
  wide.optimizer.muon.dtype = "auto";
  // In fp64 other orders of sums change no rounding to a narrow type.
  if (precision != "fp64") wide.optimizer.state_dtype = "auto";
  wide.orthogonalised_in_bf16 = false;
  wide.monitor.trace = 1;  // no step of a GPU is repeated without a word
  check_microbatches(wide);
  const RunConfig one = on_one_rank(wide);
  const Probe probe{.steps = steps, .passes = engine::passes_chosen()};
  const Control control = detail::record(one, probe);
  Verification result = detail::compare(wide, world_size, control, probe);
  if (result.equal()) return result;
  blame(wide, control, probe, result.differences);
  const Difference& first = result.differences.front();
  // An average is made of weights that were compared.
  const bool is_made = first.what == "parameter" || first.what == "average";
  if (first.step > 1 && !is_made) {
    find_uses(one, wide, world_size, probe.passes, control, result.differences);
  }
  return result;
}

RunConfig shrunk(RunConfig config, int64_t world_size) {
  const auto& mesh = config.mesh;
  auto& model = config.model;
  const int64_t runs = config.pipeline.pipeline(mesh.pp).num_runs();
  int64_t shards = mesh.tp * mesh.dp_shard;
  int64_t kinds = 1;  // of layers, one after the other
  if (model.moe.experts > 0) {
    const auto view = mesh_of(config, world_size);
    shards = std::lcm(shards,
                      view.degree(Axis::kEtp) * view.degree(Axis::kExpertDp));
    kinds = model.moe.every;
    model.moe.ffn = shrink(model.moe.ffn, shards, 2 * mesh.tp);
    model.moe.first_dense = std::min<int64_t>(model.moe.first_dense, 1);
  }
  if (config.pipeline.split.empty() || config.pipeline.is_split_chosen) {
    model.layers =
        shrink(model.layers, std::lcm(runs, kinds), std::max(2 * runs, kinds));
  }
  model.mtp.layers = std::min<int64_t>(model.mtp.layers, 2);
  model.window = std::min<int64_t>(model.window, 5);
  const bool has_pattern = model.window_every > 0;
  model.window_every = has_pattern ? 2 : 0;
  model.window_first_full =
      has_pattern ? 0 : std::min<int64_t>(model.window_first_full, 1);
  model.head_dim = std::min<int64_t>(model.head_dim, 4);
  auto& latent = model.latent;
  if (latent.kv_rank > 0) {
    latent.rope_dim = 2;
    latent.value_dim = std::min<int64_t>(latent.value_dim, 4);
    latent.kv_rank = std::min<int64_t>(latent.kv_rank, 6);
    latent.q_rank = std::min<int64_t>(latent.q_rank, 6);
  }
  model.hidden = models::family_named(model.family).heads_fill_width
                     ? model.heads * model.head_dim
                     : shrink(model.hidden, shards, 8);
  model.ffn = shrink(model.ffn, shards, 2 * mesh.tp);
  model.vocab = shrink(model.vocab, shards, 16);
  model.lora.rank = std::min<int64_t>(model.lora.rank, 2);
  // They are of the whole model.
  model.load_weights = false;
  model.lora.from.clear();
  // Into which cp and tp may cut a sequence.
  const int64_t pieces = 2 * mesh.ranks_of_model() / mesh.pp;
  config.data.seq_len = shrink(config.data.seq_len, pieces, 16);
  model.max_seq =
      std::max(config.data.seq_len, std::min<int64_t>(model.max_seq, 64));
  shrink_batch(config.batch, data_parallel_degree(config), mesh.pp,
               program::schedules::names_file(config.pipeline.schedule));
  // It was a run of the whole model.
  if (config.pipeline.cuts_by_run()) config.pipeline.cut = "layers";
  models::drop_lost_targets(model);
  optim::drop_idle_groups(config.optimizer, engine::trained_names(config));
  complete(config, world_size);
  return config;
}

}  // namespace tessera::verify
