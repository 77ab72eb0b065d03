// A GPT-2 in its own loop, of plain torch::nn or (`decoder`) the very one that
// `tessera train` has, sharded by fully_shard() or data parallel:
// bench/own_module_bench.py's program, started as several ranks.
//
// Usage: own_module fully_shard|ddp|decoder STEPS LAYERS HIDDEN HEADS
//        VOCABULARY LENGTH SAMPLES fp32|bf16; SAMPLES of this rank. Rank 0
//        prints, as JSON, the seconds of each step.
#include <torch/torch.h>

#include <chrono>
#include <iostream>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/kept_memory.h"
#include "tessera/launch/environment.h"
#include "tessera/launch/store.h"
#include "tessera/models/model.h"
#include "tessera/wrappers/distributed_data_parallel.h"
#include "tessera/wrappers/fully_shard.h"
#include "tessera/wrappers/fused_adam.h"
#include "tests/support/plain_gpt.h"

namespace nn = torch::nn;
namespace ts = tessera;
using ts::tests::Gpt;
using ts::tests::Shape;

namespace {

double now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

// The trainer's model, with the loss that the trainer takes of it.
struct DecoderImpl : nn::Module {
  std::shared_ptr<ts::models::Model> model;
  explicit DecoderImpl(const Shape& shape) {
    ts::models::ModelConfig config;
    config.family = "gpt2";
    config.layers = shape.layers;
    config.hidden = shape.hidden;
    config.heads = shape.heads;
    config.ffn = 4 * shape.hidden;
    config.vocab = shape.vocabulary;
    config.max_seq = shape.length;
    config.tie_embeddings = true;
    model = register_module("model", ts::models::make_model(config));
    ts::nn::materialise(*model, {});
  }
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& targets) {
    const auto [sum, count] = model->loss(ids, targets);
    return sum / count;
  }
};
TORCH_MODULE(Decoder);

template <typename Model>
at::Tensor loss_of(Model& model, const Gpt& /*module*/,
                   const at::Tensor& inputs, const at::Tensor& targets) {
  return at::cross_entropy_loss(
      model.forward(inputs).flatten(0, 1).to(at::kFloat), targets.flatten());
}
template <typename Model>
at::Tensor loss_of(Model& model, const Decoder& /*module*/,
                   const at::Tensor& inputs, const at::Tensor& targets) {
  return model.forward(inputs, targets);
}

// Clipped as torch_step.py clips.
template <typename Model, typename Module>
void run(Model& model, Module& module, const Shape& shape, int64_t steps,
         bool prints, const std::function<void()>& clip) {
  ts::FusedAdamW optimizer(
      module->parameters(),
      torch::optim::AdamWOptions(1e-3).betas({0.9, 0.95}).weight_decay(0.1));
  const auto ids =
      torch::randint(shape.vocabulary, {shape.samples, shape.length + 1});
  const auto inputs = ids.narrow(1, 0, shape.length);
  const auto targets = ids.narrow(1, 1, shape.length);
  std::string times;
  for (int64_t step = 0; step < steps; ++step) {
    const double start = now();
    loss_of(model, module, inputs, targets).backward();
    clip();
    optimizer.step();
    optimizer.zero_grad();
    times += c10::str(step > 0 ? ", " : "", now() - start);
  }
  if (prints) std::cout << "{\"step_s\": [" << times << "]}\n";
}

void train(ts::comm::Communicator& ranks, int count, char** arguments) {
  TS_CHECK_USAGE(count == 10, "own_module takes nine arguments.");
  const auto number = [&](int i) { return std::stoll(arguments[i]); };
  const Shape shape{number(3), number(4), number(5),
                    number(6), number(7), number(8)};
  const bool prints = ranks.rank() == 0;
  if (std::string(arguments[1]) == "ddp") {
    Gpt gpt(shape);
    ts::DistributedDataParallel model(gpt, ranks.world());
    return run(model, gpt, shape, number(2), prints,
               [&] { nn::utils::clip_grad_norm_(gpt->parameters(), 1.0); });
  }
  const int64_t world = ranks.world_size();
  ts::FullyShardOptions options;
  if (std::string(arguments[9]) == "bf16") {
    options.compute_dtype = at::kBFloat16;
    options.reduce_dtype = at::kFloat;
  }
  const auto sharded = [&](auto module) {
    auto model = ts::fully_shard(
        module, ts::mesh::DeviceMesh({.dp_shard = world}, world), ranks,
        options);
    run(model, module, shape, number(2), prints,
        [&] { model.clip_grad_norm(1.0); });
  };
  if (std::string(arguments[1]) == "decoder") {
    options.units = {"model.blocks.*"};
    return sharded(Decoder(shape));
  }
  sharded(Gpt(shape));
}

}  // namespace

int main(int count, char** arguments) {
  ts::keep_freed_memory();
  try {
    const auto meeting =
        ts::launch::join(ts::launch::discover(ts::launch::process_variables()));
    const auto& here = meeting.environment;
    const auto ranks =
        ts::comm::make_communicator({.rank = here.rank,
                                     .world_size = here.world_size,
                                     .local_world_size = here.local_world_size,
                                     .store = meeting.store,
                                     .address = meeting.address});
    train(*ranks, count, arguments);
  } catch (const ts::Error& error) {
    std::cerr << ts::message_of(error) << "\n";
    return static_cast<int>(error.exit_code());
  }
}
