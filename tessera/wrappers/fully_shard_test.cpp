// fully_shard against one rank, in double, for modules of several kinds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/wrappers/fully_shard.h"

namespace tessera {
namespace {

namespace nn = torch::nn;

constexpr int64_t kRows = 12;  // divides by 2, 3, 4
constexpr int kSteps = 6;

// What the tests ask of a module: rows in, rows out.
struct NetImpl : nn::Module {
  virtual at::Tensor forward(const at::Tensor& x) = 0;
  // Of `rows` rows.
  virtual at::Tensor input(int64_t rows) const {
    return at::arange(rows * 6, at::kDouble).mul(0.37).sin().view({rows, 6});
  }
};
using Net = std::shared_ptr<NetImpl>;

// Odd shapes, a scalar, a frozen and an unused parameter, a weight used twice.
struct MlpImpl : NetImpl {
  nn::Linear in{6, 13}, mid{13, 13}, out{13, 6}, unused{3, 2};
  at::Tensor scale;
  MlpImpl() {
    register_module("in", in);
    register_module("mid", mid);
    register_module("out", out);
    register_module("unused", unused);
    scale = register_parameter("scale", torch::tensor(0.7));
    mid->bias.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) override {
    auto h = at::tanh(in->forward(x));
    h = at::tanh(mid->forward(h)) * scale + h;
    h = out->forward(h);
    return at::linear(h, out->weight.t());
  }
};

struct CnnImpl : NetImpl {
  nn::Sequential path{nn::Conv2d(nn::Conv2dOptions(1, 5, 3).padding(1)),
                      nn::BatchNorm2d(5),
                      nn::ReLU(),
                      nn::Conv2d(nn::Conv2dOptions(5, 3, 3).padding(1)),
                      nn::GroupNorm(nn::GroupNormOptions(1, 3).affine(false)),
                      nn::Flatten(),
                      nn::Linear(48, 4)};
  CnnImpl() { register_module("path", path); }
  at::Tensor forward(const at::Tensor& x) override { return path->forward(x); }
  at::Tensor input(int64_t rows) const override {
    return at::arange(rows * 16, at::kDouble)
        .mul(0.37)
        .sin()
        .view({rows, 1, 4, 4});
  }
};

struct BlockImpl : nn::Module {
  nn::LayerNorm norm{nn::LayerNormOptions({8})};
  nn::Linear qkv{8, 24}, out{8, 8}, up{8, 20}, down{20, 8};
  BlockImpl() {
    register_module("norm", norm);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = qkv->forward(norm->forward(x)).chunk(3, -1);
    const auto h = x + out->forward(at::scaled_dot_product_attention(
                           parts[0], parts[1], parts[2], {}, 0.0, true));
    return h + down->forward(at::gelu(up->forward(norm->forward(h))));
  }
};
TORCH_MODULE(Block);

// A GPT of plain torch::nn with a tied head.
struct GptImpl : NetImpl {
  nn::Embedding tokens{11, 8}, places{5, 8};
  nn::ModuleList blocks;
  nn::LayerNorm last{nn::LayerNormOptions({8})};
  GptImpl() {
    register_module("tokens", tokens);
    register_module("places", places);
    register_module("blocks", blocks);
    for (int i = 0; i < 3; ++i) blocks->push_back(Block());
    register_module("last", last);
  }
  at::Tensor forward(const at::Tensor& ids) override {
    auto h = tokens->forward(ids) + places->forward(at::arange(5));
    for (const auto& block : *blocks) h = block->as<BlockImpl>()->forward(h);
    return at::linear(last->forward(h), tokens->weight);
  }
  at::Tensor input(int64_t rows) const override {
    return at::arange(rows * 5).mul(7).remainder(11).view({rows, 5});
  }
};

// One block several times, and blocks not in the order of their declaration.
struct WeavingImpl : NetImpl {
  nn::ModuleList layers;
  WeavingImpl() {
    register_module("layers", layers);
    for (int i = 0; i < 3; ++i) layers->push_back(nn::Linear(6, 6));
  }
  at::Tensor forward(const at::Tensor& x) override {
    auto h = x;
    for (int i : {2, 0, 2, 1, 1, 0}) {
      h = h + at::tanh(layers[i]->as<nn::Linear>()->forward(h));
    }
    return h;
  }
};

struct RecurrentImpl : NetImpl {
  nn::LSTM lstm{nn::LSTMOptions(6, 7).num_layers(2).batch_first(true)};
  nn::Linear out{7, 3};
  RecurrentImpl() {
    register_module("lstm", lstm);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) override {
    return out->forward(std::get<0>(lstm->forward(x.unsqueeze(1)))).squeeze(1);
  }
};

struct Kind {
  const char* name;
  std::function<Net()> make;
};
const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"mlp", [] { return std::make_shared<MlpImpl>(); }},
      {"cnn", [] { return std::make_shared<CnnImpl>(); }},
      {"gpt", [] { return std::make_shared<GptImpl>(); }},
      {"weaving", [] { return std::make_shared<WeavingImpl>(); }},
      {"lstm", [] { return std::make_shared<RecurrentImpl>(); }},
  };
  return all;
}

Net make(const Kind& kind, uint64_t seed = 1) {
  Net net = kind.make();
  net->to(at::kDouble);
  const at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  for (auto& p : net->parameters()) p.normal_(0, 0.3, generator);
  net->eval();  // BatchNorm over a part of the rows is another function
  return net;
}

at::Tensor loss_of(const at::Tensor& out) { return out.pow(2).mean(); }

at::Tensor rows_of(const Net& net, int step) {
  const at::Tensor all = net->input(kRows);
  return all.is_floating_point() ? all + 0.1 * step : (all + step) % 11;
}

using Values = std::vector<at::Tensor>;

Values values_of(nn::Module& module) {
  Values values;
  for (auto& p : module.parameters()) values.push_back(p.detach().clone());
  return values;
}

Values one_rank(const Kind& kind) {
  Net net = make(kind);
  torch::optim::AdamW optimizer(net->parameters(),
                                torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of(net->forward(rows_of(net, step))).backward();
    nn::utils::clip_grad_norm_(net->parameters(), 0.5);
    optimizer.step();
  }
  return values_of(*net);
}

struct Case {
  int64_t replicate = 1, shard = 2;
  FullyShardOptions options = {};
  int64_t microbatches = 1;
  bool own_backward = true;  // the loss's, instead of the model's
};

Values many_ranks(const Kind& kind, const Case& c) {
  const int64_t world = c.replicate * c.shard;
  const mesh::DeviceMesh mesh(
      {.dp_replicate = c.replicate, .dp_shard = c.shard}, world);
  std::vector<Values> results(world);
  comm::run_threads(world, "shm", [&](comm::Communicator& ranks) {
    Net net;
    comm::in_turn(ranks.world(), [&] { net = make(kind, 1 + ranks.rank()); });
    auto model = fully_shard(net, mesh, ranks, c.options);
    torch::optim::AdamW optimizer(net->parameters(),
                                  torch::optim::AdamWOptions(1e-2));
    const int64_t share = kRows / world, micro = share / c.microbatches;
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const at::Tensor mine =
          rows_of(net, step).narrow(0, ranks.rank() * share, share);
      for (int64_t m = 0; m < c.microbatches; ++m) {
        auto loss = loss_of(model.forward(mine.narrow(0, m * micro, micro))) /
                    c.microbatches;
        if (m + 1 < c.microbatches) {
          model.accumulate(loss);
        } else {
          c.own_backward ? loss.backward() : model.backward(loss);
        }
      }
      model.clip_grad_norm(0.5);
      optimizer.step();
    }
    const auto whole = model.gather();
    results[ranks.rank()] = values_of(*net);
  });
  for (const auto& result : results) {
    for (size_t i = 0; i < result.size(); ++i) {
      EXPECT_TRUE(at::equal(result[i], results[0][i]));
    }
  }
  return results[0];
}

void expect_equal(const Values& found, const Values& wanted, double bound) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].sizes(), wanted[i].sizes());
    const double norm = wanted[i].norm().item<double>();
    EXPECT_LE((found[i] - wanted[i]).norm().item<double>(), bound * norm)
        << "parameter " << i;
  }
}

TEST(FullyShard, EqualsOneRank) {
  for (const Kind& kind : kinds()) {
    const Values wanted = one_rank(kind);
    for (int64_t stage : {1, 2, 3}) {
      for (const Case& c : {Case{.shard = 2}, Case{.shard = 3},
                            Case{.shard = 4}, Case{.replicate = 2}}) {
        for (const bool keeps : {true, false}) {
          Case with = c;
          with.options.zero_stage = stage;
          with.options.reshard_after_forward = !keeps;
          with.options.prefetch = keeps ? 0 : 1;
          SCOPED_TRACE(c10::str(kind.name, " stage ", stage, " ", c.replicate,
                                "x", c.shard, " keeps ", keeps));
          expect_equal(many_ranks(kind, with), wanted, 1e-10);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
