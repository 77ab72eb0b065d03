#include "tessera/engine/run_config.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tessera/engine/model_cut.h"
#include "tessera/engine/reader.h"
#include "tessera/engine/update_config.h"
#include "tessera/models/family.h"
#include "tessera/nn/fp8_product.h"
#include "tessera/nn/gpu/program.h"
#include "tessera/optim/registry.h"
#include "tessera/parallel/compose.h"
#include "tessera/parallel/pipeline/stages.h"

namespace tessera::engine {
namespace {

constexpr double kMaxSteps = 1e12;

// "cuda,cpu": {"cuda", "cpu"}.
std::vector<std::string> devices_in(const std::string& text) {
  std::vector<std::string> names;
  std::istringstream list(text + ",");
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names;
}

std::string complaint_about_devices(const config::Value& value) {
  constexpr std::array kNames = {"auto", "cpu", "cuda"};
  for (const auto& name : devices_in(std::get<std::string>(value))) {
    if (std::ranges::find(kNames, name) == kNames.end()) {
      return "\"" + name + "\" is none of auto, cpu, cuda";
    }
  }
  return "";
}

std::string complaint_about_name(const config::Value& value) {
  const auto& name = std::get<std::string>(value);
  constexpr size_t kLongest = 255;  // bytes of a file's name
  const bool is_folder_name =
      !name.empty() && name != "." && name != ".." && name.size() <= kLongest &&
      std::ranges::none_of(name, [](unsigned char letter) {
        return letter == '/' || letter < 0x20 || letter == 0x7f;
      });
  return is_folder_name ? ""
                        : "it names a folder: 1 to 255 bytes, no '/', no "
                          "control characters";
}

// A key was set by the user, not left at its default.
bool is_set(const config::Provenance& origins, const std::string& key) {
  const auto origin = origins.find(key);
  return origin != origins.end() && origin->second != "default";
}

template <typename T>
void take(T& mine, const T& folders, const std::string& key,
          const config::Provenance& origins) {
  TS_CHECK_CONFIG(!is_set(origins, key) || mine == folders, key, " is ", mine,
                  " (", origins.at(key), "), but the folder in model.from has ",
                  folders, ". Leave the key out.");
  mine = folders;
}

// How long sequences get is the user's: who says something of it says it all.
void take_rope_scaling(models::RopeScalingConfig& mine,
                       const models::RopeScalingConfig& folders,
                       const config::Provenance& origins) {
  const bool says = std::ranges::any_of(origins, [&](const auto& origin) {
    return origin.first.starts_with("model.rope_scaling.") &&
           is_set(origins, origin.first);
  });
  if (!says) mine = folders;
}

void complete_batch(BatchConfig& batch, int64_t data_parallel,
                    int64_t world_size) {
  const bool known_micro = batch.micro > 0;
  const std::string micro = known_micro ? std::to_string(batch.micro) : "?";
  const int64_t multiple = data_parallel * std::max<int64_t>(batch.micro, 1);
  const int64_t below = batch.global / multiple * multiple;
  TS_CHECK_CONFIG(
      batch.global % multiple == 0, "batch: batch.global ", batch.global,
      " = batch.micro ", micro, " x accumulation ? x data-parallel degree ",
      data_parallel, " (", world_size, world_size == 1 ? " rank" : " ranks",
      world_size > data_parallel
          ? c10::str(", ", world_size / data_parallel, " to a replica")
          : "",
      ") has no solution: ", batch.global, " is no multiple of ", multiple,
      ". Nearest batch.global: ", below > 0 ? c10::str(below, " or ") : "",
      below + multiple, ".");
  if (!known_micro) batch.micro = batch.global / data_parallel;
}

// It was chosen for what the keys were before.
void forget_chosen_split(parallel::pipeline::PipelineConfig& config) {
  if (config.is_split_chosen) config.split.clear();
  config.is_split_chosen = false;
  config.seconds_seen.clear();
  config.speeds_seen.clear();
}

// Its devices are threads of one process, each with the whole model.
void check_star(const RunConfig& config) {
  if (!config.mesh.star()) return;
  const mesh::MeshConfig& degrees = config.mesh;
  const auto refuse = [](bool holds, const char* key, const auto& value,
                         const char* plain) {
    TS_CHECK_CONFIG(holds, key, " is ", value,
                    ", but with mesh.data_parallel dp every device has the "
                    "whole model. Use ",
                    plain, ", or mesh.data_parallel ddp.");
  };
  std::vector<mesh::Axis> axes(mesh::kAxes.begin(), mesh::kAxes.end());
  axes.insert(axes.end(), {mesh::Axis::kEp, mesh::Axis::kEtp});
  for (const mesh::Axis axis : axes) {
    if (mesh::is_of_data(axis)) continue;
    const std::string key = std::string("mesh.") + mesh::name_of(axis);
    refuse(degrees.degree(axis) == 1, key.c_str(), degrees.degree(axis), "1");
  }
  refuse(config.zero.stage == 0, "zero.stage", config.zero.stage, "0");
  refuse(config.zero.expert_stage <= 0, "zero.expert_stage",
         config.zero.expert_stage, "0");
  refuse(config.zero.offload == "none", "zero.offload", config.zero.offload,
         "none");
  refuse(config.model.lora.rank == 0, "model.lora.rank", config.model.lora.rank,
         "0");
  refuse(config.model.mtp.layers == 0, "model.mtp.layers",
         config.model.mtp.layers, "0");
  refuse(config.recompute.mode == "none", "recompute.mode",
         config.recompute.mode, "none");
  const std::string& balance = config.model.moe.balance;
  TS_CHECK_CONFIG(
      balance == "sample", "model.moe.balance is ", balance,
      ", but devices of mesh.data_parallel dp do not tell each other "
      "what their samples chose. Use sample, or mesh.data_parallel "
      "ddp.");
}

// A batch is in the middle of the pipeline while the update before it is made:
// what that would change for it is not there yet, and on a rank with all stages
// it would be.
void check_delays(const RunConfig& config) {
  if (!config.pipeline.delayed()) return;
  const std::string& schedule = config.pipeline.schedule;
  const auto refuse = [&](bool holds, const std::string& key, const char* why,
                          const char* instead) {
    TS_CHECK_CONFIG(holds, key, ", but pipeline.schedule ", schedule, " ", why,
                    ". Use ", instead, ", or pipeline.schedule 1f1b.");
  };
  refuse(!config.mesh.star(), "mesh.data_parallel is dp",
         "keeps two versions of the weights, which devices around device 0 do "
         "not have",
         "ddp");
  refuse(!config.optimizer.skip_nonfinite, "optimizer.skip_nonfinite is true",
         "has gone on to another version of the weights when a step is to be "
         "run again, to name what is not finite",
         "false");
  refuse(config.precision.loss_scale != 0,
         "precision.loss_scale is 0, by which each update may change the scale",
         "has begun the next batch by then", "a fixed precision.loss_scale");
  refuse(config.zero.offload != "all", "zero.offload is all",
         "reads two versions of the weights in turn, of which files hold one",
         "none or optimizer");
  refuse(!reads_for_others(config), "data.reader is first",
         "has two batches under way, and a rank that reads for others moves "
         "one at a time",
         "every");
}

void check_trace(const RunConfig& config) {
  const int64_t traceable = config.run.steps - 1;
  TS_CHECK_CONFIG(config.monitor.trace <= traceable, "monitor.trace is ",
                  config.monitor.trace,
                  " steps from the second on, but run.steps is ",
                  config.run.steps, ". Nearest: ", traceable, ".");
}

// Where the host decides by a step's numbers what the next does, none is late.
void check_losses_late(const RunConfig& config) {
  if (config.monitor.losses_late == 0) return;
  const auto refuse = [&](bool holds, const std::string& key, const char* why) {
    TS_CHECK_CONFIG(holds, "monitor.losses_late is ",
                    config.monitor.losses_late, ", but ", key, " ", why,
                    ". Use monitor.losses_late 0.");
  };
  refuse(!config.optimizer.skip_nonfinite, "optimizer.skip_nonfinite is true",
         "has the host look at each step before the next one begins");
  refuse(config.precision.loss_scale == 1, "precision.loss_scale is not 1",
         "has the host look at each step before the next one begins");
  refuse(!config.pipeline.delayed(),
         "pipeline.schedule is " + config.pipeline.schedule,
         "begins a step in the one before and ends that by its norm");
}

// Why zero.expert_shard changes nothing; "" where it does.
std::string idle_expert_shard(const RunConfig& config) {
  if (config.model.moe.experts == 0) {
    return "is not used by a model without experts";
  }
  if (config.zero.stage_of_experts() == 0) {
    return "is not used while zero.expert_stage is 0: experts are not sharded";
  }
  return config.mesh.dp_replicate > 1
             ? ""
             : "changes nothing where mesh.dp_replicate is 1: there is one "
               "replica";
}

// Whether the model fits the mesh, which it returns.
mesh::DeviceMesh complete_place(RunConfig& config, int64_t world_size) {
  config.model.complete();
  TS_CHECK_CONFIG(config.data.seq_len <= config.model.max_seq, "data.seq_len (",
                  config.data.seq_len, ") is above model.max_seq (",
                  config.model.max_seq,
                  "), the longest sequence of the model.");
  TS_CHECK_CONFIG(config.model.mtp.layers < config.data.seq_len,
                  "model.mtp.layers (", config.model.mtp.layers,
                  ") leaves no token of data.seq_len (", config.data.seq_len,
                  ") a target that far ahead. Nearest model.mtp.layers: ",
                  config.data.seq_len - 1, ".");
  const auto mesh = mesh_of(config, world_size);
  config.mesh.dp_replicate = mesh.degree(mesh::Axis::kDpReplicate);
  config.mesh.dp_shard = mesh.degree(mesh::Axis::kDpShard);
  parallel::check(config.model, config.data.seq_len, mesh, config);
  return mesh;
}

}  // namespace

c10::DeviceType RunSection::device_of_stage(int64_t stage) const {
  return device_types.size() == 1 ? device_types.front()
                                  : device_types.at(stage);
}

bool RunSection::is_on_cpu() const {
  return std::ranges::all_of(
      device_types, [](c10::DeviceType type) { return type == at::kCPU; });
}

void RunSection::declare(config::Section& section) {
  section.key("name", name, "of the run, and of its folder in `dir`")
      .check(complaint_about_name);
  section.key("dir", dir, "folder of run folders")
      .check([](const config::Value& value) -> std::string {
        return std::get<std::string>(value).empty()
                   ? "it is empty: use . for the current folder"
                   : "";
      });
  section.key("seed", seed, "of initial weights and of the order of the data")
      .at_least(0);
  section.key("steps", steps, "updates of the weights, in all")
      .at_least(1)
      .at_most(kMaxSteps);
  section
      .key("device", device,
           "that the ranks compute on: cpu, cuda or auto; several, separated "
           "by commas, are those of the pipeline's stages")
      .check(complaint_about_devices);
  section
      .key("threads", threads,
           "of a rank; 0: the cores, shared out among the ranks")
      .at_least(0)
      .at_most(4096);
}

void BatchConfig::declare(config::Section& section) {
  section.key("global", global, "samples a step, over all ranks")
      .at_least(1)
      .at_most(1e9);
  section
      .key("micro", micro,
           "samples a micro-batch on a rank, in the mean where mesh.speeds are "
           "uneven; 0: a rank's whole share of global")
      .at_least(0)
      .at_most(1e9);
}

void ValidateConfig::declare(config::Section& section) {
  section
      .key("every", every,
           "steps between validations; 0: at checkpoints and the end")
      .at_least(0)
      .at_most(kMaxSteps);
  section
      .key("samples", samples,
           "of the held-out data, the first ones; 0: all of them")
      .at_least(0)
      .at_most(kMaxSteps);
  section.key("at_start", at_start, "validate before the first step too");
  section
      .key("patience", patience,
           "validations in a row without a lower loss that end the run; 0: it "
           "goes on")
      .at_least(0)
      .at_most(kMaxSteps);
  section.key("ema", ema, "measure the average of the weights: optimizer.ema");
}

void RunConfig::declare(config::Section& section) {
  section.section("run", run, "the run as a whole");
  section.section("model", model, "what is trained");
  section.section("data", data, "what it is trained on");
  section.section("batch", batch,
                  "global = micro x accumulation x data-parallel degree");
  section.section("mesh", mesh, "how the ranks are laid out");
  declare_sections(section);
  section.section("optimizer", optimizer, "how weights are updated");
  section.section("schedule", schedule, "the learning rate over the run");
  section.section("validate", validate, "when held-out data is measured");
  section.section("comm", comm, "how ranks talk");
  section.section("checkpoint", checkpoint, "what a run can be resumed from");
  section.section("monitor", monitor, "what is told about the run");
}

RunConfig run_config_from_text(const std::string& text,
                               const std::string& source,
                               const std::vector<config::Override>& overrides,
                               config::Provenance* origins) {
  RunConfig config;
  config::Section root;
  config.declare(root);
  auto found = config::resolve(root, text, source, overrides);
  if (origins) *origins = std::move(found);
  return config;
}

RunConfig read_run_config(const std::string& path,
                          const std::vector<config::Override>& overrides,
                          config::Provenance* origins) {
  TS_CHECK_CONFIG(path.empty() || std::filesystem::is_regular_file(path), path,
                  ": there is no such configuration file.");
  const std::string text =
      path.empty() ? "{}" : tessera::detail::read_json_text(path);
  return run_config_from_text(text, path, overrides, origins);
}

std::string to_json(const RunConfig& config) {
  RunConfig copy = config;
  config::Section root;
  copy.declare(root);
  return config::to_json(root);
}

namespace {

// A folder's modules may be left out, as they are where nothing trains them,
// and a model begin with new ones.
void take_mtp(RunConfig& config, int64_t depths,
              const config::Provenance& origins) {
  auto& model = config.model;
  if (!is_set(origins, "model.mtp.layers")) {
    const bool has_adapters = model.lora.rank > 0 || !model.lora.from.empty();
    model.mtp.layers = has_adapters || config.mesh.star() ? 0 : depths;
  }
  TS_CHECK_CONFIG(!model.load_weights || model.mtp.layers == 0 ||
                      model.mtp.layers == depths,
                  "model.mtp.layers is ", model.mtp.layers,
                  ", but model.from has the weights of ", depths,
                  " modules. Use model.mtp.layers ",
                  depths > 0 ? c10::str(depths, " or ") : "",
                  "0, or train from the beginning (model.load_weights false).");
}

}  // namespace

void read_model_folder(RunConfig& config, const config::Provenance& origins) {
  auto& model = config.model;
  TS_CHECK_CONFIG(!model.load_weights || !model.from.empty(),
                  "model.load_weights is true, but model.from is empty. Set "
                  "model.from to the folder that holds the weights.");
  if (model.from.empty()) return;
  take_sizes(config, checkpoint::hugging_face_config(model.from).model,
             origins);
  TS_CHECK_CONFIG(
      !model.load_weights || !model.moe.bias_balance ||
          models::family_named(model.family).score_bias,
      "model.moe.bias_balance is true, but the weights of a Hugging Face "
      "folder "
      "of model.family ",
      model.family,
      " have no bias to load. Balance by model.moe.aux_loss, or train from the "
      "beginning.");
}

void take_sizes(RunConfig& config, const models::ModelConfig& folder,
                const config::Provenance& origins) {
  auto& model = config.model;
  take(model.family, folder.family, "model.family", origins);
  take(model.layers, folder.layers, "model.layers", origins);
  take(model.hidden, folder.hidden, "model.hidden", origins);
  take(model.heads, folder.heads, "model.heads", origins);
  take(model.kv_heads, folder.kv_heads, "model.kv_heads", origins);
  take(model.head_dim, folder.head_dim, "model.head_dim", origins);
  take(model.ffn, folder.ffn, "model.ffn", origins);
  take(model.vocab, folder.vocab, "model.vocab", origins);
  take(model.max_seq, folder.max_seq, "model.max_seq", origins);
  take(model.tie_embeddings, folder.tie_embeddings, "model.tie_embeddings",
       origins);
  take(model.norm_eps, folder.norm_eps, "model.norm_eps", origins);
  take(model.query_pre_attn_scalar, folder.query_pre_attn_scalar,
       "model.query_pre_attn_scalar", origins);
  take(model.rope_theta, folder.rope_theta, "model.rope_theta", origins);
  take(model.rope_theta_local, folder.rope_theta_local,
       "model.rope_theta_local", origins);
  take_rope_scaling(model.rope_scaling, folder.rope_scaling, origins);
  take(model.window, folder.window, "model.window", origins);
  take(model.window_every, folder.window_every, "model.window_every", origins);
  take(model.window_first_full, folder.window_first_full,
       "model.window_first_full", origins);
  take(model.latent.q_rank, folder.latent.q_rank, "model.latent.q_rank",
       origins);
  take(model.latent.kv_rank, folder.latent.kv_rank, "model.latent.kv_rank",
       origins);
  take(model.latent.rope_dim, folder.latent.rope_dim, "model.latent.rope_dim",
       origins);
  take(model.latent.value_dim, folder.latent.value_dim,
       "model.latent.value_dim", origins);
  take_mtp(config, folder.mtp.layers, origins);
  take(model.moe.experts, folder.moe.experts, "model.moe.experts", origins);
  take(model.moe.top_k, folder.moe.top_k, "model.moe.top_k", origins);
  take(model.moe.every, folder.moe.every, "model.moe.every", origins);
  take(model.moe.first_dense, folder.moe.first_dense, "model.moe.first_dense",
       origins);
  take(model.moe.ffn, folder.moe.ffn, "model.moe.ffn", origins);
  take(model.moe.score, folder.moe.score, "model.moe.score", origins);
  take(model.moe.normalize, folder.moe.normalize, "model.moe.normalize",
       origins);
  take(model.moe.scale, folder.moe.scale, "model.moe.scale", origins);
  take(model.moe.groups, folder.moe.groups, "model.moe.groups", origins);
  take(model.moe.top_groups, folder.moe.top_groups, "model.moe.top_groups",
       origins);
  take(model.moe.shared_experts, folder.moe.shared_experts,
       "model.moe.shared_experts", origins);
  // No sizes: how it is trained is the user's, and else as it was.
  const auto take_unless_set = [&](auto& mine, const auto& folders,
                                   const char* key) {
    if (!is_set(origins, key)) mine = folders;
  };
  take_unless_set(model.moe.aux_loss, folder.moe.aux_loss,
                  "model.moe.aux_loss");
  take_unless_set(model.moe.choice, folder.moe.choice, "model.moe.choice");
  take(model.moe.noise, folder.moe.noise, "model.moe.noise", origins);
  take_unless_set(model.moe.balance, folder.moe.balance, "model.moe.balance");
  take_unless_set(model.moe.z_loss, folder.moe.z_loss, "model.moe.z_loss");
  take_unless_set(model.moe.bias_balance, folder.moe.bias_balance,
                  "model.moe.bias_balance");
  take_unless_set(model.moe.bias_rate, folder.moe.bias_rate,
                  "model.moe.bias_rate");
  take_unless_set(model.moe.capacity_factor, folder.moe.capacity_factor,
                  "model.moe.capacity_factor");
  take_unless_set(model.dropout, folder.dropout, "model.dropout");
}

int64_t implied_world_size(const RunConfig& config) {
  const auto& mesh = config.mesh;
  const auto open = [](int64_t degree) { return std::max<int64_t>(degree, 1); };
  const int64_t data =
      mesh.dp > 0 ? mesh.dp : open(mesh.dp_replicate) * open(mesh.dp_shard);
  return data * mesh.ranks_of_model();
}

bool shards_experts_by_replica(const RunConfig& config) {
  return config.model.moe.experts > 0 &&
         config.zero.shards_experts_by_replica();
}

mesh::DeviceMesh mesh_of(const RunConfig& config, int64_t world_size) {
  return config.mesh.mesh(world_size, config.zero.stage,
                          shards_experts_by_replica(config));
}

std::optional<NotOnGpus> why_not_on_gpus(const RunConfig& config) {
  if (config.mesh.star()) return {{"mesh.data_parallel is dp", "ddp"}};
  if (config.mesh.measure_speeds) {
    return {{"mesh.measure_speeds is true", "false"}};
  }
  if (config.zero.offload == "all") {
    return {{"zero.offload is all", "optimizer or none"}};
  }
  return std::nullopt;
}

namespace {

void find_devices(RunConfig& config, int64_t stages) {
  auto& types = config.run.device_types;
  types.clear();
  for (std::string name : devices_in(config.run.device)) {
    if (name == "auto") {
      name = num_gpus() > 0 && !why_not_on_gpus(config) ? "cuda" : "cpu";
    }
    types.push_back(device_type_of(name));
  }
  const auto given = static_cast<int64_t>(types.size());
  TS_CHECK_CONFIG(given == 1 || given == stages, "run.device is ",
                  config.run.device, ", for ", given,
                  " stages, but mesh.pp is ", stages,
                  ". Give one for all ranks, or one for each stage.");
}

}  // namespace

void complete(RunConfig& config, int64_t world_size) {
  TS_CHECK_CONFIG(!config.data.train.empty(),
                  "data.train is missing: a run needs something to train on. "
                  "Give files, folders or globs: --data.train='texts/*.txt'.");
  config.data.check();
  config.optimizer.complete();
  ask_for_whole_matrices(config);
  const auto mesh = complete_place(config, world_size);
  find_devices(config, mesh.degree(mesh::Axis::kPp));
  complete_batch(config.batch, data_parallel_degree(config), world_size);
  forget_chosen_split(config.pipeline);
  parallel::pipeline::check(config.model, accumulation(config), mesh,
                            config.pipeline);
  config.precision.complete();
  check_delays(config);
  check_star(config);
  check_device(config);
  check_updates(config);
  config.precision.check();
  check_schedule(config);
  check_trace(config);
  check_losses_late(config);
  share_out(config, mesh);
}

void complete_for_evaluation(RunConfig& config, int64_t world_size) {
  config.model.mtp.layers = 0;  // it is trained with them alone
  const auto mesh = complete_place(config, world_size);
  config.batch.global = config.batch.micro * data_parallel_degree(config);
  parallel::pipeline::check(config.model, accumulation(config), mesh,
                            config.pipeline);
}

c10::DeviceType device_of_rank(const RunConfig& config, int64_t rank) {
  const auto& run = config.run;
  if (run.device_types.size() == 1) return run.device_types.front();
  const auto mesh = mesh_of(config, implied_world_size(config));
  return run.device_of_stage(mesh.coord_of(rank)[mesh::Axis::kPp]);
}

void check_device(const RunConfig& config) {
  if (config.run.is_on_cpu()) return;
  if (const auto found = why_not_on_gpus(config)) {
    TS_CHECK_CONFIG(false, found->what, ", which no GPU is built for. Use ",
                    found->instead, ", or run.device cpu.");
  }
  const bool is_fp8 = config.precision.product_type() == nn::ProductType::kFp8;
  if (is_fp8 && num_gpus() > 0) {
    check_products(config, nn::gpu::least_capability());
  }
}

void check_products(const RunConfig& config, int capability) {
  const bool is_fp8 = config.precision.product_type() == nn::ProductType::kFp8;
  TS_CHECK_CONFIG(!is_fp8 || capability >= nn::kLeastFp8Capability,
                  "precision.products is fp8, but a GPU of this host has "
                  "compute capability ",
                  capability / 10, ".", capability % 10,
                  ": 8.9 and later ones multiply it. Use precision.products "
                  "same, or run.device cpu, which emulates it.");
}

void check_schedule(const RunConfig& config) {
  const bool as_deepspeed = config.schedule.convention == "deepspeed";
  TS_CHECK_CONFIG(!as_deepspeed || config.schedule.type != "wsd",
                  "schedule.convention is deepspeed, which has no "
                  "schedule.type wsd. Use constant, linear or cosine, or "
                  "schedule.convention tessera.");
  const bool own = config.schedule.steps > 0;
  const int64_t steps = own ? config.schedule.steps : config.run.steps;
  // WarmupLR is of no length: DeepSpeed's default is longer than many runs.
  const bool endless = as_deepspeed && config.schedule.type == "constant";
  TS_CHECK_CONFIG(
      endless || config.schedule.warmup <= steps, "schedule.warmup is ",
      config.schedule.warmup, ", longer than the ",
      own ? "schedule: schedule.steps is " : "run: run.steps is ", steps, ".");
  TS_CHECK_CONFIG(config.schedule.type == "constant" ||
                      config.schedule.min_lr <= config.optimizer.lr,
                  "schedule.min_lr (", config.schedule.min_lr,
                  ") is above optimizer.lr (", config.optimizer.lr,
                  "), from which the learning rate falls to it. Lower the one, "
                  "or raise the other.");
  const bool warms_up = as_deepspeed || config.schedule.warmup > 0;
  TS_CHECK_CONFIG(!warms_up || config.schedule.start_lr <= config.optimizer.lr,
                  "schedule.start_lr (", config.schedule.start_lr,
                  ") is above optimizer.lr (", config.optimizer.lr,
                  "), to which the learning rate grows from it. Lower the one, "
                  "or raise the other.");
}

double aux_mean(const RunConfig& config) {
  const int64_t layers = config.model.layers_with_experts();
  return layers == 0 ? 0.0
                     : 1.0 / static_cast<double>(config.batch.global * layers);
}

int64_t data_parallel_degree(const RunConfig& config) {
  return config.mesh.dp_replicate * config.mesh.dp_shard;
}

int64_t accumulation(const RunConfig& config) {
  return config.batch.global /
         (config.batch.micro * data_parallel_degree(config));
}

std::string offload_folder(const RunConfig& config) {
  if (!config.zero.offload_folder.empty()) return config.zero.offload_folder;
  return (std::filesystem::path(config.run.dir) / config.run.name).string();
}

std::vector<std::string> without_effect(const RunConfig& config,
                                        const config::Provenance& origins) {
  std::vector<std::string> found;
  const auto values = tessera::detail::parse_json(to_json(config), "");
  const auto defaults = tessera::detail::parse_json(to_json(RunConfig()), "");
  // A default that is written out, as a run's own config.json has them, wants
  // nothing.
  const auto is_asked_for = [&](const std::string& key) {
    tessera::detail::Json::json_pointer at;
    std::istringstream parts(key);
    for (std::string part; std::getline(parts, part, '.');) at /= part;
    return is_set(origins, key) && values.at(at) != defaults.at(at);
  };
  const auto note = [&](bool idle, const std::string& key,
                        const std::string& why) {
    if (idle && is_asked_for(key)) found.push_back(key + " " + why);
  };
  const auto& optimizer = optim::update_rule(config.optimizer.type);
  for (const std::string key : {"betas", "eps", "momentum"}) {
    note(!optimizer.uses(key), "optimizer." + key,
         "is not used by optimizer.type " + optimizer.name);
  }
  std::ranges::copy(betas_without_effect(config), std::back_inserter(found));
  for (const std::string key : {"momentum", "nesterov", "steps", "eps",
                                "adjust_lr", "dtype", "adamw_lr"}) {
    note(!config.whole_matrices, "optimizer.muon." + key,
         "is not used by optimizer.type " + optimizer.name);
  }
  note(config.optimizer.normalize_grad && config.optimizer.clip_norm >= 1,
       "optimizer.clip_norm",
       "has nothing to do: optimizer.normalize_grad gives every gradient the "
       "norm 1");
  for (const char* key :
       {"precision.initial_loss_scale", "precision.scale_growth_interval",
        "precision.scale_hysteresis", "precision.consecutive_hysteresis",
        "precision.min_loss_scale"}) {
    note(config.precision.loss_scale != 0, key,
         "is not used unless precision.loss_scale is 0");
  }
  for (const char* key : {"schedule.warmup_type", "schedule.start_lr"}) {
    note(config.schedule.warmup == 0 && config.schedule.convention == "tessera",
         key, "is not used while schedule.warmup is 0");
  }
  note(config.mesh.star(), "data.reader",
       "is not used by mesh.data_parallel dp, which is one rank");
  note(!config.mesh.star() && config.mesh.ranks_of_model() == 1, "data.reader",
       "changes nothing where mesh.pp, cp and tp are 1: every rank trains on "
       "samples of its own");
  note(config.pipeline.schedule != "gpipe", "pipeline.order",
       "is not used by pipeline.schedule " + config.pipeline.schedule);
  std::ranges::copy(idle_cuts(config), std::back_inserter(found));
  note(config.schedule.type == "constant", "schedule.min_lr",
       "is not used by schedule.type constant");
  note(config.schedule.type != "wsd", "schedule.decay",
       "is not used by schedule.type " + config.schedule.type);
  note(config.schedule.type == "constant", "schedule.steps",
       "is not used by schedule.type constant");
  const bool validates =
      !config.data.valid.empty() || config.data.valid_share > 0;
  for (const char* key :
       {"validate.every", "validate.samples", "validate.at_start",
        "validate.patience", "validate.ema", "checkpoint.keep_best"}) {
    note(!validates, key, "is not used without data.valid or data.valid_share");
  }
  for (const char* key : {"monitor.sample_prompt", "monitor.sample_tokens",
                          "monitor.sample_temperature"}) {
    note(config.monitor.sample == 0, key,
         "is not used while monitor.sample is 0: no text is written");
  }
  for (const char* key : {"model.lora.alpha", "model.lora.targets"}) {
    note(config.model.lora.rank == 0, key,
         "is not used while model.lora.rank is 0: all weights are trained");
  }
  note(config.model.lora.rank > 0 && !config.model.load_weights,
       "model.lora.rank",
       "freezes weights that are random: model.load_weights is false");
  note(config.zero.offload == "none", "zero.offload_folder",
       "is not used while zero.offload is none");
  const std::string& mode = config.recompute.mode;
  note(mode != "block" && mode != "stage", "recompute.every",
       "is not used by recompute.mode " + mode);
  note(mode == "stage" && config.recompute.every >= config.model.num_blocks(),
       "recompute.every", "is no less than a stage has blocks, as 0 is");
  const auto& family = models::family_named(config.model.family);
  for (const char* key : {"model.rope_theta", "model.rope_scaling.type"}) {
    note(family.learned_positions, key,
         "is not used by model.family " + config.model.family +
             ", whose positions are learned");
  }
  for (const char* key : {"model.window_every", "model.window_first_full"}) {
    note(config.model.window == 0, key,
         "is not used while model.window is 0: all layers see all");
  }
  const std::string& scaling = config.model.rope_scaling.type;
  for (const auto& [key, types] : std::map<std::string, std::set<std::string>>{
           {"factor", {"linear", "llama3", "yarn"}},
           {"original_max_seq", {"llama3", "yarn"}},
           {"low_freq_factor", {"llama3"}},
           {"high_freq_factor", {"llama3"}},
           {"beta_fast", {"yarn"}},
           {"beta_slow", {"yarn"}},
           {"truncate", {"yarn"}},
           {"attention_factor", {"yarn"}},
           {"mscale", {"yarn"}}}) {
    note(!types.contains(scaling), "model.rope_scaling." + key,
         "is not used by model.rope_scaling.type " + scaling);
  }
  for (const char* key :
       {"model.moe.top_k",          "model.moe.every",
        "model.moe.first_dense",    "model.moe.ffn",
        "model.moe.score",          "model.moe.normalize",
        "model.moe.scale",          "model.moe.groups",
        "model.moe.top_groups",     "model.moe.capacity_factor",
        "model.moe.shared_experts", "model.moe.choice",
        "model.moe.noise",          "model.moe.balance",
        "model.moe.aux_loss",       "model.moe.z_loss",
        "model.moe.bias_balance",   "model.moe.bias_rate",
        "zero.expert_stage",        "mesh.etp"}) {
    note(config.model.moe.experts == 0, key,
         "is not used by a model without experts");
  }
  note(config.mesh.ep == 1, "expert.dispatch_chunks",
       "is not used while mesh.ep is 1: tokens stay where their experts are");
  const std::string idle = idle_expert_shard(config);
  note(!idle.empty(), "zero.expert_shard", idle);
  note(config.model.moe.aux_loss == 0, "model.moe.balance",
       "is not used while model.moe.aux_loss is 0");
  for (const char* key :
       {"model.moe.aux_loss", "model.moe.balance", "model.moe.normalize"}) {
    note(config.model.moe.experts_choose(), key,
         "is not used by model.moe.choice experts");
  }
  note(config.model.mtp.layers == 0, "model.mtp.weight",
       "is not used while model.mtp.layers is 0");
  note(!config.model.moe.bias_balance, "model.moe.bias_rate",
       "is not used while model.moe.bias_balance is false");
  return found;
}

}  // namespace tessera::engine
