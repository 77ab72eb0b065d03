// A GPT of plain torch::nn, its parameters, gradients and optimizer states
// shared out over four ranks (ZeRO stage 3).
#include <torch/torch.h>

#include <iostream>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/wrappers/fully_shard.h"

namespace nn = torch::nn;
namespace ts = tessera;

constexpr int64_t kVocabulary = 16, kLength = 12, kWidth = 32;

struct GPTImpl : nn::Module {
  nn::Embedding tokens{kVocabulary, kWidth}, places{kLength, kWidth};
  nn::TransformerEncoder blocks{nn::TransformerEncoderOptions(
      nn::TransformerEncoderLayerOptions(kWidth, /*nhead=*/4).dropout(0), 3)};
  nn::Linear head{kWidth, kVocabulary};
  GPTImpl() {
    register_module("tokens", tokens);
    register_module("places", places);
    register_module("blocks", blocks);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& ids) {  // (T, B) -> (T, B, V)
    const auto place = places->forward(at::arange(kLength)).unsqueeze(1);
    return head->forward(blocks->forward(
        tokens->forward(ids) + place,
        nn::TransformerImpl::generate_square_subsequent_mask(kLength)));
  }
};
TORCH_MODULE(GPT);

void train(ts::comm::Communicator& ranks) {
  GPT gpt{nullptr};
  ts::comm::in_turn(ranks.world(),
                    [&] { gpt = (torch::manual_seed(0), GPT()); });
  auto model =
      ts::fully_shard(gpt, ts::mesh::DeviceMesh({.dp_shard = 4}, 4), ranks);
  torch::optim::AdamW optimizer(gpt->parameters(), /*lr=*/3e-3);  // of shards
  auto random = at::make_generator<at::CPUGeneratorImpl>(ranks.rank());
  for (int step = 0; step <= 60; ++step) {  // numbers that count on
    const auto first = torch::randint(kVocabulary, {1, 8}, random);
    const auto ids =
        (first + at::arange(kLength + 1).unsqueeze(1)) % kVocabulary;
    const auto logits = model.forward(ids.narrow(0, 0, kLength));
    const auto loss = torch::cross_entropy_loss(
        logits.flatten(0, 1), ids.narrow(0, 1, kLength).flatten());
    optimizer.zero_grad();
    loss.backward();
    model.clip_grad_norm(1.0);
    optimizer.step();
    if (ranks.rank() != 0 || step % 20 != 0) continue;
    std::cout << "step " << step << " loss " << loss.item<float>() << "\n";
  }
}

int main() { ts::comm::run_threads(/*world_size=*/4, "shm", train); }
