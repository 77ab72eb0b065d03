// What tests/parity/test_own_module.py runs: a GPT-2 of plain torch::nn, as one
// of the ranks that a launcher started. The script has the same in PyTorch.
//
//   module_driver KIND DTYPE [FOLDER]
//                               KIND: ddp, hybrid, or 0 to 3, the stage of
//                               fully_shard, or engine0 to engine3, that of
//                               initialize; DTYPE: fp64, fp32, bf16
// Rank 0 prints of each of ten steps the loss, the mean over the ranks, and the
// norm of the gradients. FOLDER gets a checkpoint of a sharded one.
#include <cstdio>
#include <iostream>

#include "tessera/core/error.h"
#include "tessera/module_engine/initialize.h"
#include "tessera/module_engine/sharded_checkpoint.h"
#include "tessera/wrappers/distributed_data_parallel.h"
#include "tests/support/plain_gpt.h"
#include "tests/support/values_by_name.h"

namespace {

using namespace tessera;

constexpr tests::Shape kShape{.layers = 3,
                              .hidden = 32,
                              .heads = 4,
                              .vocabulary = 61,
                              .length = 16,
                              .samples = 4};
constexpr int kSteps = 10;
constexpr double kLr = 3e-3, kDecay = 0.1, kClipNorm = 1.0;

tests::Gpt make_gpt(at::ScalarType dtype) {
  tests::Gpt gpt(kShape);
  gpt->to(dtype);
  tests::give_values_by_name(*gpt);
  return gpt;
}

// Samples of this rank, (samples, length + 1).
at::Tensor ids_of(int64_t step, int64_t rank) {
  const at::Tensor sample =
      at::arange(kShape.samples).add(rank * kShape.samples).unsqueeze(1);
  const at::Tensor place = at::arange(kShape.length + 1).unsqueeze(0);
  return (7 * sample + 3 * place + 11 * step + sample * place)
      .remainder(kShape.vocabulary);
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& ids) {
  const at::Tensor wide =
      logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  return at::cross_entropy_loss(wide.flatten(0, 1),
                                ids.narrow(1, 1, kShape.length).flatten());
}

at::Tensor inputs_of(const at::Tensor& ids) {
  return ids.narrow(1, 0, kShape.length);
}

void print(comm::Communicator& ranks, const at::Tensor& loss, double norm) {
  at::Tensor mean = loss.detach().to(at::kDouble);
  ranks.world().all_reduce(mean, comm::ReduceOp::kMean).synchronize();
  if (ranks.rank() > 0) return;
  std::printf("%.17g %.17g\n", mean.item<double>(), norm);
}

// `clip` gives the norm, `save` a checkpoint at the end.
template <typename Model>
void run(
    Model& model, tests::Gpt& gpt, comm::Communicator& ranks,
    const std::function<double()>& clip,
    const std::function<void(torch::optim::Optimizer&)>& save = [](auto&) {}) {
  torch::optim::AdamW optimizer(
      gpt->parameters(), torch::optim::AdamWOptions(kLr).weight_decay(kDecay));
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor ids = ids_of(step, ranks.rank());
    const at::Tensor loss = loss_of(model.forward(inputs_of(ids)), ids);
    optimizer.zero_grad();
    loss.backward();
    const double norm = clip();
    optimizer.step();
    print(ranks, loss, norm);
  }
  save(optimizer);
}

void run_engine(tests::Gpt& gpt, comm::Communicator& ranks,
                const std::string& stage, bool rounds,
                const std::string& folder) {
  const std::string json = c10::str(
      R"({"train_micro_batch_size_per_gpu": )", kShape.samples,
      R"(, "gradient_accumulation_steps": 1, "gradient_clipping": )", kClipNorm,
      R"(, "optimizer": {"type": "AdamW", "params": {"lr": )", kLr,
      R"(, "weight_decay": )", kDecay, R"(}}, "bf16": {"enabled": )",
      rounds ? "true" : "false", R"(}, "zero_optimization": {"stage": )", stage,
      "}}");
  auto engine = initialize(gpt, json, ranks);
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor ids = ids_of(step, ranks.rank());
    const at::Tensor loss = loss_of(engine.forward(inputs_of(ids)), ids);
    engine.backward(loss);
    engine.step();
    print(ranks, loss, engine.global_grad_norm());
  }
  if (!folder.empty()) engine.save_checkpoint(folder, "words of my own");
}

void train(const std::string& kind, const std::string& dtype,
           const std::string& folder) {
  const StartedRanks started;
  comm::Communicator& ranks = started.ranks();
  const int64_t world = ranks.world_size();
  tests::Gpt gpt = make_gpt(dtype == "fp64" ? at::kDouble : at::kFloat);
  const bool rounds = dtype == "bf16";
  const std::string engine = "engine";
  if (kind.starts_with(engine)) {
    return run_engine(gpt, ranks, kind.substr(engine.size()), rounds, folder);
  }
  if (kind == "ddp") {
    DistributedDataParallel model(gpt, ranks.world());
    return run(model, gpt, ranks, [&] {
      return torch::nn::utils::clip_grad_norm_(gpt->parameters(), kClipNorm);
    });
  }
  FullyShardOptions options;
  if (rounds) options.compute_dtype = at::kBFloat16;
  mesh::Degrees degrees{.dp_shard = world};
  if (kind == "hybrid") {
    degrees = {.dp_replicate = 2, .dp_shard = world / 2};
  } else {
    options.zero_stage = std::stoll(kind);
  }
  auto model =
      fully_shard(gpt, mesh::DeviceMesh(degrees, world), ranks, options);
  run(
      model, gpt, ranks, [&] { return model.clip_grad_norm(kClipNorm); },
      [&](torch::optim::Optimizer& optimizer) {
        if (folder.empty()) return;
        ShardedCheckpoint(folder, model, optimizer, ranks).save(kSteps, "mine");
      });
}

}  // namespace

int main(int count, char** arguments) {
  try {
    TS_CHECK_USAGE(count == 3 || count == 4,
                   "module_driver KIND DTYPE [FOLDER]");
    train(arguments[1], arguments[2], count == 4 ? arguments[3] : "");
  } catch (const std::exception& error) {
    std::cerr << message_of(error) << "\n";
    return 1;
  }
}
