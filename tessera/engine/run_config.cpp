#include "tessera/engine/run_config.h"

#include <algorithm>
#include <filesystem>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/engine/model_cut.h"
#include "tessera/engine/reader.h"
#include "tessera/engine/run_devices.h"
#include "tessera/engine/update_config.h"
#include "tessera/parallel/compose.h"
#include "tessera/parallel/pipeline/stages.h"

namespace tessera::engine {
namespace {

constexpr double kMaxSteps = 1e12;

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
  refuse(!config.zero.offloads(), "zero.offload", config.zero.offload, "none");
  refuse(config.model.lora.rank == 0, "model.lora.rank", config.model.lora.rank,
         "0");
  refuse(config.model.mtp.layers == 0, "model.mtp.layers",
         config.model.mtp.layers, "0");
  refuse(config.recompute.mode == "none", "recompute.mode",
         config.recompute.mode, "none");
  TS_CHECK_CONFIG(!config.batch.uneven,
                  "batch.uneven is true, but devices of mesh.data_parallel dp "
                  "have shares of a size. Leave it out, or use "
                  "mesh.data_parallel ddp.");
  TS_CHECK_CONFIG(config.monitor.reruns == 0, "monitor.reruns is ",
                  config.monitor.reruns,
                  ", but devices of mesh.data_parallel dp have no gradients of "
                  "their own to compare. Use 0, or mesh.data_parallel ddp.");
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
  refuse(!config.spike.rewinds(), "spike.action is rewind",
         "has the next batch under way when a step's loss is known", "warn");
  refuse(config.monitor.reruns == 0, "monitor.reruns is above 0",
         "has begun a step's batch before a step can be computed for itself",
         "monitor.replicas");
  refuse(config.precision.loss_scale != 0,
         "precision.loss_scale is 0, by which each update may change the scale",
         "has begun the next batch by then", "a fixed precision.loss_scale");
  refuse(!config.zero.offloads_parameters(), "zero.offload is all",
         "reads two versions of the weights in turn, of which files hold one",
         "none or optimizer");
  refuse(!reads_for_others(config), "data.reader is first",
         "has two batches under way, and a rank that reads for others moves "
         "one at a time",
         "every");
}

void check_background(const RunConfig& config) {
  TS_CHECK_CONFIG(!config.checkpoint.async || !config.zero.offloads(),
                  "checkpoint.async is true, which copies what is saved into "
                  "memory, but zero.offload is ",
                  config.zero.offload,
                  ", by which it lies in files. Use checkpoint.async false, or "
                  "zero.offload none.");
}

void check_spikes(const RunConfig& config) {
  const auto& checkpoint = config.checkpoint;
  TS_CHECK_CONFIG(
      !config.spike.rewinds() || checkpoint.saves() ||
          checkpoint.saves_locally(),
      "spike.action is rewind, but checkpoint.every and checkpoint.local_every "
      "are 0: there is no checkpoint to go back to. Set one of them, or "
      "spike.action warn.");
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

// Whether the model fits the mesh, which it returns.
mesh::DeviceMesh complete_place(RunConfig& config, int64_t world_size) {
  config.model.complete();
  TS_CHECK_CONFIG(config.data.seq_len <= config.model.max_seq, "data.seq_len (",
                  config.data.seq_len, ") is above model.max_seq (",
                  config.model.max_seq,
                  "), the longest sequence of the model. Use data.seq_len ",
                  config.model.max_seq,
                  " or less, or where positions are not learned a larger "
                  "model.max_seq.");
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

void read_into(RunConfig& config, const std::string& text,
               const std::string& source,
               const std::vector<config::Override>& overrides,
               config::Provenance* origins) {
  config::Section root;
  config.declare(root);
  auto found = config::resolve(root, text, source, overrides);
  if (origins) *origins = std::move(found);
}

RunConfig read_of_any_build(const std::string& text, const std::string& source,
                            const std::vector<config::Override>& overrides,
                            config::Provenance* origins) {
  RunConfig config;
  config.comm.is_of_this_build = false;
  read_into(config, text, source, overrides, origins);
  return config;
}

// As it is in the file, or "{}".
std::string text_of_file(const std::string& path) {
  TS_CHECK_CONFIG(path.empty() || std::filesystem::exists(path), path,
                  ": there is no such configuration file.");
  TS_CHECK_CONFIG(path.empty() || std::filesystem::is_regular_file(path), path,
                  ": is no file, but a folder, a pipe or a device. A "
                  "configuration is read by every rank: save it to a file.");
  return path.empty() ? "{}" : tessera::detail::read_json_text(path);
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

std::string RunSection::device_text() const {
  std::string names;
  for (const auto type : device_types) {
    names += (names.empty() ? "" : ",") +
             c10::DeviceTypeName(type, /*lower_case=*/true);
  }
  return names;
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
  section.section("batch", batch, "how the samples of a step are cut");
  section.section("mesh", mesh, "how the ranks are laid out");
  declare_sections(section);
  section.section("optimizer", optimizer, "how weights are updated");
  section.section("schedule", schedule, "the learning rate over the run");
  section.section("validate", validate, "when held-out data is measured");
  section.section("spike", spike, "what a loss far above those before it does");
  section.section("comm", comm, "how ranks talk");
  section.section("checkpoint", checkpoint, "what a run can be resumed from");
  section.section("monitor", monitor, "what is told about the run");
}

RunConfig run_config_from_text(const std::string& text,
                               const std::string& source,
                               const std::vector<config::Override>& overrides,
                               config::Provenance* origins) {
  RunConfig config;
  read_into(config, text, source, overrides, origins);
  return config;
}

RunConfig read_run_config(const std::string& path,
                          const std::vector<config::Override>& overrides,
                          config::Provenance* origins) {
  return run_config_from_text(text_of_file(path), path, overrides, origins);
}

RunConfig read_planned_config(const std::string& path,
                              const std::vector<config::Override>& overrides,
                              config::Provenance* origins) {
  return read_of_any_build(text_of_file(path), path, overrides, origins);
}

RunConfig saved_run_config(const std::string& text, const std::string& source) {
  return read_of_any_build(text, source, {}, nullptr);
}

std::string to_json(const RunConfig& config) {
  RunConfig copy = config;
  config::Section root;
  copy.declare(root);
  return config::to_json(root);
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

void complete(RunConfig& config, int64_t world_size) {
  TS_CHECK_CONFIG(!config.data.train.empty(),
                  "data.train is missing: a run needs something to train on. "
                  "Give files, folders or globs: --data.train='texts/*.txt'.");
  config.data.check();
  config.optimizer.complete();
  ask_for_whole_matrices(config);
  const auto mesh = complete_place(config, world_size);
  find_devices(config, mesh.degree(mesh::Axis::kPp));
  config.batch.complete(data_parallel_degree(config), world_size);
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
  check_background(config);
  check_spikes(config);
  check_trace(config);
  check_losses_late(config);
  share_out(config, mesh);
}

void complete_for_evaluation(RunConfig& config, int64_t world_size) {
  config.model.mtp.layers = 0;  // it is trained with them alone
  const auto mesh = complete_place(config, world_size);
  find_devices(config, mesh.degree(mesh::Axis::kPp));
  check_device(config);
  config.batch.global = config.batch.micro * data_parallel_degree(config);
  parallel::pipeline::check(config.model, accumulation(config), mesh,
                            config.pipeline);
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
  return config.batch.microbatches(data_parallel_degree(config));
}

int64_t samples_of_microbatch(const RunConfig& config) {
  return config.batch.global / accumulation(config);
}

bool has_uneven_batch(const RunConfig& config) {
  return samples_of_microbatch(config) % data_parallel_degree(config) != 0;
}

std::string offload_folder(const RunConfig& config) {
  if (!config.zero.offload_folder.empty()) return config.zero.offload_folder;
  return (std::filesystem::path(config.run.dir) / config.run.name).string();
}

}  // namespace tessera::engine
