#include "tessera/engine/detail/deepspeed_keys.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace tessera::engine::detail {
namespace {

using Effect = DeepSpeedEffect;
using enum DeepSpeedType;

// Entries one behind the other; `names` are several of one kind: "a b c".
class List {
 public:
  // Of the names that follow: "zero_optimization.".
  List& in(const char* prefix) {
    prefix_ = prefix;
    return *this;
  }
  List& becomes(const char* name, DeepSpeedType type, const char* to) {
    return add(name, {.type = type, .effect = Effect::kBecomes, .to = to});
  }
  List& part(const char* name, DeepSpeedType type, const char* to) {
    return add(name, {.type = type, .effect = Effect::kPart, .to = to});
  }
  List& choice(const char* names, const char* to, const char* choices,
               const char* refusal) {
    return add(names, {.type = kWord,
                       .effect = Effect::kPart,
                       .to = to,
                       .choices = choices,
                       .refusal = refusal});
  }
  List& same(const char* names, DeepSpeedType type, const char* value,
             const char* why) {
    return add(
        names,
        {.type = type, .effect = Effect::kSame, .value = value, .why = why});
  }
  List& idle(const char* names, DeepSpeedType type, const char* why) {
    return add(names, {.type = type, .effect = Effect::kIdle, .why = why});
  }
  List& only(const char* names, DeepSpeedType type, const char* value,
             const char* refusal) {
    return add(names, {.type = type,
                       .effect = Effect::kOnly,
                       .value = value,
                       .refusal = refusal});
  }
  List& idle_section(const char* names, const char* inside, const char* why) {
    return add(names, {.type = kObject,
                       .effect = Effect::kIdleSection,
                       .inside = inside,
                       .why = why});
  }
  List& refused_section(const char* names, const char* refusal) {
    return add(names, {.type = kObject,
                       .effect = Effect::kRefusedSection,
                       .refusal = refusal});
  }
  List& add(const char* names, DeepSpeedKey key) {
    for (const auto& name : words_in(names)) {
      key.name = prefix_ + name;
      keys_.push_back(key);
    }
    return *this;
  }

  std::vector<DeepSpeedKey> take() { return std::move(keys_); }

 private:
  std::string prefix_;
  std::vector<DeepSpeedKey> keys_;
};

constexpr const char* kSameFormula = "another program for the same formula";
constexpr const char* kUnits =
    "parameters are gathered and freed by layer; zero.prefetch counts layers";
constexpr const char* kSameSums =
    "how gradients travel does not change their sums, and is not chosen by it";
constexpr const char* kMean =
    "gradients are shares of the global mean before they are summed";
constexpr const char* kInMemory =
    "the CPU's memory holds all states of its ranks, and those of GPUs go to "
    "files alone, as nvme says";
constexpr const char* kNoDevice =
    "what goes to a device and back is pinned, and on the CPU nothing goes";
constexpr const char* kByUnit =
    "files are mapped: the system reads and writes them, one unit ahead";
constexpr const char* kQuantized =
    "gathers and reductions are not quantized: the model would differ";
constexpr const char* kCheckpoints =
    "checkpoints are sharded, atomic and load on any mesh as they are";
constexpr const char* kMetrics =
    "metrics.jsonl, summary.json and monitor.trace have it always";
constexpr const char* kNotBuilt = "it is not built";

void add_batch(List& keys) {
  keys.in("")
      .becomes("train_batch_size", kWhole, "batch.global")
      .becomes("train_micro_batch_size_per_gpu", kWhole, "batch.micro")
      .part("gradient_accumulation_steps", kWhole,
            "`batch.global` / (`batch.micro` x data-parallel degree)")
      .becomes("gradient_clipping", kNumber, "optimizer.clip_norm")
      .same("prescale_gradients", kFlag, "false", kMean)
      .idle("gradient_predivide_factor", kNumber, kMean)
      .only("gradient_allreduce_op", kWord, "\"mean\"",
            "a loss is the mean over the global batch")
      .only("managed_gradient_accumulation", kFlag, "true",
            "a step is a whole batch")
      .same("sparse_gradients", kFlag, "false", kSameSums)
      .idle("dataloader_drop_last", kFlag,
            "a step has train_batch_size samples always");
}

void add_optimizer(List& keys) {
  keys.in("optimizer.")
      .choice("type",
              "`optimizer.type`: Adam is adamw unless adam_w_mode is "
              "false",
              "Adam AdamW SGD Lion Muon",
              "its updates are another optimizer's, which is not built")
      .idle("legacy_fusion", kFlag, kSameFormula);
  keys.in("optimizer.params.")
      .part("lr", kNumber, "`optimizer.lr`, unless the scheduler sets it")
      .becomes("betas", kNumbers, "optimizer.betas")
      .becomes("eps", kNumber, "optimizer.eps")
      .becomes("weight_decay", kNumber, "optimizer.weight_decay")
      .part("momentum", kNumber,
            "`optimizer.momentum` of SGD, `optimizer.muon.momentum` of Muon")
      .part("muon_lr", kNumber, "`optimizer.lr` of Muon, over lr")
      .part("adam_lr", kNumber,
            "`optimizer.muon.adamw_lr`, of all but hidden matrices, over lr")
      .idle("ns_method", kWord, kSameFormula)
      .part("adam_w_mode", kFlag,
            "`optimizer.type` of Adam: adamw (true, as without it) or adam")
      .part("torch_adam", kFlag,
            "AdamW's weight_decay where that is not given: 0.01, not 0")
      .only("bias_correction", kFlag, "true", "moments are corrected always")
      .only("amsgrad nesterov maximize", kFlag, "false", kNotBuilt)
      .only("dampening", kNumber, "0", kNotBuilt)
      .only("max_grad_norm", kNumber, "0",
            "DeepSpeed refuses it too: use gradient_clipping")
      .only("fp32_optimizer_states", kFlag, "true", kNotBuilt)
      .idle("fused foreach", kFlag, kSameFormula);
  keys.in("")
      .idle("zero_allow_untested_optimizer", kFlag,
            "every optimizer is tested with every stage")
      .idle("zero_force_ds_cpu_optimizer", kFlag, kSameFormula);
}

void add_scheduler(List& keys) {
  keys.in("scheduler.")
      .choice("type",
              "`schedule.type` constant, linear, cosine, with "
              "`schedule.convention` deepspeed",
              "WarmupLR WarmupDecayLR WarmupCosineLR",
              "cycles of the learning rate, or of the momentum, are not built");
  keys.in("scheduler.params.")
      .part("warmup_min_lr", kNumber,
            "`schedule.start_lr`, and of WarmupDecayLR `schedule.min_lr`")
      .part("warmup_max_lr", kNumber, "`optimizer.lr`")
      .part("warmup_num_steps", kWhole, "`schedule.warmup`")
      .choice("warmup_type", "`schedule.warmup_type`", "linear log",
              "DeepSpeed would take log in its place")
      .part("total_num_steps", kWhole, "`schedule.steps`")
      .part("warmup_min_ratio", kNumber,
            "`schedule.start_lr`: so much of `optimizer.lr`")
      .part("cos_min_ratio", kNumber,
            "`schedule.min_lr`: so much of `optimizer.lr`")
      .only("last_batch_iteration", kWhole, "-1",
            "a run that goes on takes its step from the checkpoint");
}

void add_precision(List& keys) {
  keys.in("fp16.")
      .part("enabled", kFlag, "`precision.compute` fp16, with fp32 masters")
      .part("loss_scale", kNumber,
            "`precision.loss_scale`: 0, found while training, or fixed")
      .part("initial_scale_power", kWhole,
            "`precision.initial_loss_scale`: 2 to this power")
      .part("loss_scale_window", kWhole, "`precision.scale_growth_interval`")
      .part("hysteresis", kWhole, "`precision.scale_hysteresis`")
      .part("consecutive_hysteresis", kFlag,
            "`precision.consecutive_hysteresis`")
      .part("min_loss_scale", kNumber, "`precision.min_loss_scale`")
      .same("auto_cast", kFlag, "false",
            "what enters the model is numbers of tokens")
      .idle("fused_mode", kFlag, kSameFormula)
      .only("fp16_master_weights_and_grads", kFlag, "false",
            "masters and moments are fp32; precision.reduce fp16 keeps the "
            "gradients in fp16");
  keys.in("bf16.")
      .part("enabled", kFlag, "`precision.compute` bf16, with fp32 masters")
      .idle("immediate_grad_update", kFlag, kSameSums)
      .only("bf16_master_weights_and_grads bf16_optimizer_states", kFlag,
            "false", kNotBuilt)
      .becomes("check_grad_overflow", kFlag, "optimizer.skip_nonfinite");
  keys.in("")
      .choice("communication_data_type data_types.grad_accum_dtype",
              "`precision.reduce`, one for both", "fp32 bf16 bfp16 fp16",
              "gradients have none of this type")
      .idle("seq_parallel_comm_data_type", kWord,
            "activations travel in their own type")
      .refused_section("amp torch_autocast", "use bf16 or fp16 in its place");
}

void add_zero(List& keys) {
  keys.in("zero_optimization.")
      .becomes("stage", kWhole, "zero.stage")
      .part("reduce_bucket_size", kWhole,
            "`zero.bucket_mb`: elements x bytes of a gradient")
      .part("mics_shard_size", kWhole, "`mesh.dp_shard`, where above 0")
      .same("allgather_partitions", kFlag, "true",
            "parameters are gathered, not broadcast: the same values")
      .idle("allgather_bucket_size", kWhole, kUnits)
      .same("overlap_comm", kFlag, "true",
            "communication runs behind computation wherever it can")
      .same("contiguous_gradients", kFlag, "true",
            "gradients lie in flat buffers always")
      .same("reduce_scatter", kFlag, "true", kSameSums)
      .same("round_robin_gradients legacy_stage1", kFlag, "false", kSameSums)
      .idle("use_multi_rank_bucket_allreduce", kFlag, kSameSums)
      .idle("sub_group_size", kWhole, "the optimizer updates layer by layer")
      .idle(
          "stage3_max_live_parameters stage3_max_reuse_distance "
          "stage3_prefetch_bucket_size stage3_param_persistence_threshold "
          "stage3_model_persistence_threshold "
          "stage3_module_granularity_threshold "
          "stage3_partition_stream_chunk_size",
          kWhole, kUnits)
      .idle(
          "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
          "mics_hierarchical_params_gather",
          kFlag, kUnits)
      .idle_section("leaf_module", "", kUnits)
      .same("zero_hpz_partition_size", kWhole, "1",
            "mesh.dp_shard with mesh.dp_replicate keeps gathers in a host")
      .same(
          "stage3_gather_16bit_weights_on_model_save "
          "stage3_gather_fp16_weights_on_model_save",
          kFlag, "false",
          "'tessera convert' writes whole weights of any checkpoint")
      .only(
          "zero_quantized_weights zero_quantized_nontrainable_weights "
          "zero_quantized_gradients",
          kFlag, "false", kQuantized)
      .refused_section("zeropp_loco_param", kQuantized)
      .refused_section("zenflow", kNotBuilt)
      .idle(
          "load_from_fp32_weights elastic_checkpoint "
          "pipeline_loading_checkpoint",
          kFlag, kCheckpoints)
      .idle("memory_efficient_linear save_muon_momentum_buffer_in_memory",
            kFlag, kSameFormula)
      .idle("ignore_unused_parameters override_module_apply", kFlag,
            "the models are Tessera's own")
      .idle("log_trace_cache_warnings enable_sanity_checks", kFlag,
            "a step is a list that is checked before it runs");
}

void add_offload(List& keys) {
  for (const char* const of : {"offload_optimizer.", "offload_param."}) {
    const bool optimizer = std::string_view(of) == "offload_optimizer.";
    keys.in((std::string("zero_optimization.") + of).c_str())
        .add("device", {.type = kWord,
                        .effect = Effect::kPart,
                        .to = optimizer ? "`zero.offload` optimizer, where nvme"
                                        : "`zero.offload` all, where nvme",
                        .choices = "none cpu nvme",
                        .why = kInMemory,
                        .refusal = kNotBuilt})
        .part("nvme_path", kWord, "`zero.offload_folder`, where device is nvme")
        .idle("pin_memory", kFlag, kNoDevice)
        .idle("buffer_count", kWhole, kByUnit);
  }
  keys.in("zero_optimization.offload_optimizer.")
      .idle("fast_init pipeline pipeline_read pipeline_write super_offload",
            kFlag, kByUnit)
      .idle("ratio cpuadam_cores_perc", kNumber, kNoDevice);
  keys.in("zero_optimization.offload_param.")
      .idle("buffer_size max_in_cpu", kWhole, kByUnit);
  keys.in("zero_optimization.")
      .same("cpu_offload cpu_offload_param", kFlag, "false", kInMemory)
      .idle("cpu_offload_use_pin_memory", kFlag, kNoDevice);
}

void add_mesh(List& keys) {
  keys.in("activation_checkpointing.")
      .part("partition_activations cpu_checkpointing", kFlag,
            "`recompute.mode` block, where true")
      .part("number_checkpoints", kWhole,
            "`recompute.mode` block, where above 0")
      .same("contiguous_memory_optimization synchronize_checkpoint_boundary",
            kFlag, "false",
            "recompute.mode block keeps the input of a layer and no more")
      .same("profile", kFlag, "false", kMetrics);
  keys.in("pipeline.")
      .becomes("stages", kWhole, "mesh.pp")
      .part("activation_checkpoint_interval", kWhole,
            "`recompute.mode` block, where above 0")
      .idle("partition", kWord, "pipeline.split says which layers go together")
      .idle("seed_layers", kFlag, "weights follow from run.seed on any mesh");
  keys.in("moe.")
      .part("enabled", kFlag, "whether the rest of moe is read")
      .becomes("num_experts", kWhole, "model.moe.experts")
      .becomes("k", kWhole, "model.moe.top_k")
      .becomes("expert_parallel_size", kWhole, "mesh.ep");
  keys.in("")
      .becomes("tensor_parallel.autotp_size", kWhole, "mesh.tp")
      .part("expert_parallel.enabled", kFlag,
            "whether expert_parallel.autoep_size is read")
      .becomes("expert_parallel.autoep_size", kWhole, "mesh.ep")
      .becomes("sequence_parallel_size", kWhole, "mesh.cp")
      .idle("use_data_before_expert_parallelism", kFlag,
            "mesh.order lays out the ranks, and experts are folded from it");
}

void add_rest(List& keys) {
  keys.in("")
      .becomes("steps_per_print", kWhole, "monitor.every")
      .becomes("tensorboard.enabled", kFlag, "monitor.tensorboard")
      .idle("tensorboard.output_path tensorboard.job_name", kWord,
            "events lie in the run's folder")
      .idle_section("csv_monitor", "enabled output_path job_name", kMetrics)
      .idle_section("wandb", "enabled group team project", kMetrics)
      .idle_section("comms_logger", "enabled verbose prof_all prof_ops debug",
                    kMetrics)
      .idle_section("comet", "", kMetrics)
      .same("wall_clock_breakdown memory_breakdown", kFlag, "false", kMetrics)
      .same("dump_state", kFlag, "false", "--print-config shows every value")
      .idle_section("flops_profiler",
                    "enabled recompute_fwd_factor profile_step module_depth "
                    "top_modules detailed output_file",
                    "'tessera bench step' says where a step's time goes")
      .idle_section("checkpoint",
                    "tag_validation load_universal use_node_local_storage "
                    "parallel_write",
                    kCheckpoints)
      .idle_section("nebula", "", kCheckpoints)
      .idle_section("aio", "", kByUnit)
      .idle_section("compile", "", kSameFormula)
      .same("graph_harvesting", kFlag, "false", kSameFormula)
      .same("disable_allgather", kFlag, "false", kUnits)
      .refused_section("elasticity",
                       "a batch that follows the world trains another model: "
                       "give train_batch_size")
      .refused_section("autotuning",
                       "nothing is tuned while it trains: give the sizes that "
                       "it found")
      .refused_section(
          "data_efficiency curriculum_learning "
          "progressive_layer_drop eigenvalue quantize_training "
          "compression_training sparse_attention hybrid_engine",
          kNotBuilt);
}

}  // namespace

const std::vector<DeepSpeedKey>& deepspeed_keys() {
  static const std::vector<DeepSpeedKey> keys = [] {
    List list;
    for (auto* add : {add_batch, add_optimizer, add_scheduler, add_precision,
                      add_zero, add_offload, add_mesh, add_rest}) {
      add(list);
    }
    return list.take();
  }();
  return keys;
}

const DeepSpeedKey* deepspeed_key(std::string_view name) {
  const auto& keys = deepspeed_keys();
  const auto found = std::ranges::find(keys, name, &DeepSpeedKey::name);
  return found == keys.end() ? nullptr : &*found;
}

std::vector<std::string> words_in(std::string_view list) {
  std::istringstream stream{std::string(list)};
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

}  // namespace tessera::engine::detail
