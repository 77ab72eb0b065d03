// A GPT-2 of plain torch::nn, as anybody would write it: what is put around a
// user's own module is measured and compared with it.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace tessera::tests {

struct Shape {
  int64_t layers, hidden, heads, vocabulary, length, samples;
};

struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm attention_norm{nullptr}, mlp_norm{nullptr};
  torch::nn::Linear qkv{nullptr}, o{nullptr}, up{nullptr}, down{nullptr};
  int64_t heads;
  explicit BlockImpl(const Shape& shape) : heads(shape.heads) {
    const int64_t width = shape.hidden;
    const torch::nn::LayerNormOptions norm({width});
    attention_norm =
        register_module("attention_norm", torch::nn::LayerNorm(norm));
    mlp_norm = register_module("mlp_norm", torch::nn::LayerNorm(norm));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    o = register_module("o", torch::nn::Linear(width, width));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) {
    std::vector<at::Tensor> parts;
    for (const auto& y :
         qkv->forward(attention_norm->forward(x)).chunk(3, -1)) {
      parts.push_back(y.unflatten(-1, {heads, -1}).transpose(1, 2));
    }
    const auto mixed = at::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    const auto h = x + o->forward(mixed.transpose(1, 2).flatten(2));
    return h +
           down->forward(at::gelu(up->forward(mlp_norm->forward(h)), "tanh"));
  }
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{nullptr};
  explicit GptImpl(const Shape& shape) {
    const int64_t width = shape.hidden;
    tokens = register_module("tokens",
                             torch::nn::Embedding(shape.vocabulary, width));
    positions =
        register_module("positions", torch::nn::Embedding(shape.length, width));
    register_module("blocks", blocks);
    for (int64_t i = 0; i < shape.layers; ++i) blocks->push_back(Block(shape));
    norm = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    torch::nn::init::normal_(tokens->weight, 0, 0.02);
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = tokens->forward(ids) + positions->forward(at::arange(ids.size(1)));
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return at::linear(norm->forward(x), tokens->weight);
  }
};
TORCH_MODULE(Gpt);

}  // namespace tessera::tests
