// A GPT-2 of plain torch::nn in its own loop, sharded by fully_shard() or data
// parallel: bench/own_module_bench.py's program, started as several ranks.
//
// Usage: own_module fully_shard|ddp STEPS LAYERS HIDDEN HEADS VOCABULARY LENGTH
//        SAMPLES fp32|bf16; SAMPLES of this rank. Rank 0 prints, as JSON, the
//        seconds of each step.
#include <torch/torch.h>

#include <chrono>
#include <iostream>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/launch/environment.h"
#include "tessera/launch/store.h"
#include "tessera/wrappers/distributed_data_parallel.h"
#include "tessera/wrappers/fully_shard.h"
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

// Clipped as torch_step.py clips.
template <typename Model>
void run(Model& model, Gpt& gpt, const Shape& shape, int64_t steps, bool prints,
         const std::function<void()>& clip) {
  torch::optim::AdamW optimizer(
      gpt->parameters(),
      torch::optim::AdamWOptions(1e-3).betas({0.9, 0.95}).weight_decay(0.1));
  const auto ids =
      torch::randint(shape.vocabulary, {shape.samples, shape.length + 1});
  const auto inputs = ids.narrow(1, 0, shape.length);
  const auto targets = ids.narrow(1, 1, shape.length).flatten();
  std::string times;
  for (int64_t step = 0; step < steps; ++step) {
    const double start = now();
    at::cross_entropy_loss(model.forward(inputs).flatten(0, 1).to(at::kFloat),
                           targets)
        .backward();
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
  Gpt gpt(shape);
  if (std::string(arguments[1]) == "ddp") {
    ts::DistributedDataParallel model(gpt, ranks.world());
    return run(model, gpt, shape, number(2), ranks.rank() == 0,
               [&] { nn::utils::clip_grad_norm_(gpt->parameters(), 1.0); });
  }
  const int64_t world = ranks.world_size();
  ts::FullyShardOptions options;
  if (std::string(arguments[9]) == "bf16") {
    options.compute_dtype = at::kBFloat16;
    options.reduce_dtype = at::kFloat;
  }
  auto model = ts::fully_shard(
      gpt, ts::mesh::DeviceMesh({.dp_shard = world}, world), ranks, options);
  run(model, gpt, shape, number(2), ranks.rank() == 0,
      [&] { model.clip_grad_norm(1.0); });
}

}  // namespace

int main(int count, char** arguments) {
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
