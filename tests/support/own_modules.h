// Modules of several kinds, as users write them, and one loop that trains any
// of them on one rank or on many.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/wrappers/fully_shard.h"
#include "tessera/wrappers/parallelize.h"

namespace tessera::tests {

namespace nn = torch::nn;

inline constexpr int64_t kRows = 12;  // divides by 2, 3, 4
inline constexpr int kSteps = 6;

// What the tests ask of a module: rows in, rows out.
struct NetImpl : nn::Module {
  virtual at::Tensor forward(const at::Tensor& x) = 0;
  // Of `rows` rows.
  virtual at::Tensor input(int64_t rows) const { return numbers({rows, 6}); }

 protected:
  static at::Tensor numbers(const std::vector<int64_t>& shape) {
    const int64_t count = c10::multiply_integers(shape);
    return at::arange(count, at::kDouble).mul(0.37).sin().view(shape);
  }
};
using Net = std::shared_ptr<NetImpl>;

// Odd shapes, a scalar, a frozen and an unused parameter, a weight used twice.
struct MlpImpl : NetImpl {
  nn::Linear in, mid, out, unused{3, 2};
  at::Tensor scale;
  explicit MlpImpl(int64_t width = 13)
      : in(6, width), mid(width, width), out(width, 6) {
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
    return numbers({rows, 1, 4, 4});
  }
};

struct OwnBlockImpl : nn::Module {
  nn::LayerNorm norm;
  nn::Linear qkv, out, up, down;
  OwnBlockImpl(int64_t width, int64_t hidden)
      : norm(nn::LayerNormOptions({width})),
        qkv(width, 3 * width),
        out(width, width),
        up(width, hidden),
        down(hidden, width) {
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
TORCH_MODULE(OwnBlock);

// A GPT of plain torch::nn with a tied head.
struct OwnGptImpl : NetImpl {
  nn::Embedding tokens, places;
  nn::ModuleList blocks;
  nn::LayerNorm last;
  explicit OwnGptImpl(int64_t width = 8, int64_t hidden = 20)
      : tokens(11, width),
        places(5, width),
        last(nn::LayerNormOptions({width})) {
    register_module("tokens", tokens);
    register_module("places", places);
    register_module("blocks", blocks);
    for (int i = 0; i < 3; ++i) blocks->push_back(OwnBlock(width, hidden));
    register_module("last", last);
  }
  at::Tensor forward(const at::Tensor& ids) override {
    auto h = tokens->forward(ids) + places->forward(at::arange(5));
    for (const auto& block : *blocks) {
      h = block->as<OwnBlockImpl>()->forward(h);
    }
    return at::linear(last->forward(h), tokens->weight);
  }
  at::Tensor input(int64_t rows) const override {
    return at::arange(rows * 5).mul(7).remainder(11).view({rows, 5});
  }
};

// One block several times, and blocks not in the order of their declaration.
struct WeavingImpl : NetImpl {
  nn::ModuleList layers;
  const int64_t width;
  explicit WeavingImpl(int64_t of = 6) : width(of) {
    register_module("layers", layers);
    for (int i = 0; i < 3; ++i) layers->push_back(nn::Linear(width, width));
  }
  at::Tensor forward(const at::Tensor& x) override {
    auto h = x;
    for (int i : {2, 0, 2, 1, 1, 0}) {
      h = h + at::tanh(layers[i]->as<nn::Linear>()->forward(h));
    }
    return h;
  }
  at::Tensor input(int64_t rows) const override {
    return numbers({rows, width});
  }
};

struct RecurrentImpl : NetImpl {
  nn::LSTM lstm;
  nn::Linear out;
  explicit RecurrentImpl(int64_t width = 7)
      : lstm(nn::LSTMOptions(6, width).num_layers(2).batch_first(true)),
        out(width, 3) {
    register_module("lstm", lstm);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) override {
    return out->forward(std::get<0>(lstm->forward(x.unsqueeze(1)))).squeeze(1);
  }
};

// Weights so large that they travel alone, with rows that do not divide.
struct WideImpl : NetImpl {
  nn::Linear in{6, 528}, mid{528, 515}, out{515, 6};
  WideImpl() {
    register_module("in", in);
    register_module("mid", mid);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) override {
    return out->forward(at::tanh(mid->forward(in->forward(x)) / 20));
  }
};

// Products so large that they go another way in fp32: of two and of three
// dimensions, with and without a bias, of a weight that is used three times.
struct HeavyImpl : NetImpl {
  nn::Linear in{6, 300}, mid{300, 300}, out{300, 6};
  HeavyImpl() {
    register_module("in", in);
    register_module("mid", mid);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) override {
    auto h = at::tanh(mid->forward(in->forward(x)));
    h = at::tanh(mid->forward(h.unsqueeze(1)).squeeze(1) + h);
    return out->forward(at::tanh(at::linear(h, mid->weight)));
  }
};

struct Kind {
  std::string name;
  std::function<Net()> make;
  // The same with widths that divide by 2, 3 and 4; and what of it is split
  // over tp.
  std::function<Net()> make_even = {};
  ParallelPlan plan = {};
};

inline void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

template <typename Impl, typename... Sizes>
std::function<Net()> maker(Sizes... sizes) {
  return [=] { return std::make_shared<Impl>(sizes...); };
}

inline const std::vector<Kind>& kinds() {
  using Style = ParallelStyle;
  const Style column = Style::column(Lies::kWhole, Lies::kWhole);
  const Style row = Style::row(Lies::kWhole, Lies::kWhole);
  static const std::vector<Kind> all = {
      {"mlp",
       maker<MlpImpl>(),
       maker<MlpImpl>(12),
       {{"in", column}, {"mid", row}}},
      {"cnn", maker<CnnImpl>(), maker<CnnImpl>(), {{"path.6", row}}},
      {"gpt",
       maker<OwnGptImpl>(),
       maker<OwnGptImpl>(12, 24),
       {{"blocks.*.qkv", column},
        {"blocks.*.out", row},
        {"blocks.*.up", Style::column()},
        {"blocks.*.down", Style::row()}}},
      {"weaving",
       maker<WeavingImpl>(),
       maker<WeavingImpl>(12),
       {{"layers.0", column}, {"layers.[12]", row}}},
      {"lstm",
       maker<RecurrentImpl>(),
       maker<RecurrentImpl>(12),
       {{"out", row}}},
      {"wide",
       maker<WideImpl>(),
       maker<WideImpl>(),
       {{"in", Style::column()}, {"mid", Style::row()}}},
      {"heavy",
       maker<HeavyImpl>(),
       maker<HeavyImpl>(),
       {{"in", column}, {"mid", column}, {"out", row}}},
  };
  return all;
}

inline const Kind& kind_of(const std::string& name) {
  const auto found = std::ranges::find(kinds(), name, &Kind::name);
  TS_CHECK(found != kinds().end(), "no kind of module is called ", name);
  return *found;
}

inline Kind even(const Kind& kind) {
  return {kind.name, kind.make_even, kind.make_even, kind.plan};
}

inline Net make(const Kind& kind, uint64_t seed = 1,
                at::ScalarType type = at::kDouble) {
  Net net = kind.make();
  net->to(type);
  const at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  for (auto& p : net->parameters()) p.normal_(0, 0.3, generator);
  net->eval();  // BatchNorm over a part of the rows is another function
  return net;
}

inline at::Tensor loss_of(const at::Tensor& out) { return out.pow(2).mean(); }

inline at::Tensor rows_of(const Net& net, int step) {
  const at::Tensor all = net->input(kRows);
  return all.is_floating_point() ? all + 0.1 * step : (all + step) % 11;
}

using Values = std::vector<at::Tensor>;

inline Values values_of(nn::Module& module) {
  Values values;
  for (auto& p : module.parameters()) values.push_back(p.detach().clone());
  return values;
}

inline void expect_equal(const Values& found, const Values& wanted,
                         double bound) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].sizes(), wanted[i].sizes());
    const double norm = wanted[i].norm().item<double>();
    EXPECT_LE((found[i] - wanted[i]).norm().item<double>(), bound * norm)
        << "parameter " << i;
  }
}

// Of the whole: what a rank along tp has, of a dim that is cut or of none.
inline at::Tensor share_like(const at::Tensor& whole, const at::Tensor& mine,
                             int64_t tp, int64_t rank) {
  for (int64_t dim = 0; dim < whole.dim(); ++dim) {
    if (whole.size(dim) == mine.size(dim)) continue;
    return whole.chunk(tp, dim)[rank];
  }
  return whole;
}

inline Values one_rank(const Kind& kind) {
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

struct Ways {
  int64_t replicate = 1, shard = 1, tp = 1;
  FullyShardOptions options = {};
  int64_t microbatches = 1;
  bool own_backward = true;  // the loss's, instead of the model's
  int64_t data() const { return replicate * shard; }
  int64_t world() const { return data() * tp; }
};

// The same training on a rank of many; along tp its shares.
inline Values trained(comm::Communicator& ranks, const Kind& kind,
                      const Ways& ways) {
  const mesh::DeviceMesh mesh(
      {.dp_replicate = ways.replicate, .dp_shard = ways.shard, .tp = ways.tp},
      ways.world());
  const mesh::Coord coord = mesh.coord_of(ranks.rank());
  Net net;
  comm::in_turn(ranks.world(), [&] { net = make(kind, 1 + ranks.rank()); });
  std::optional<Parallelized> parallel;
  if (ways.tp > 1) parallel.emplace(*net, mesh, ranks, kind.plan);
  auto model = fully_shard(net, mesh, ranks, ways.options);
  torch::optim::AdamW optimizer(net->parameters(),
                                torch::optim::AdamWOptions(1e-2));
  const int64_t share = kRows / ways.data(), micro = share / ways.microbatches;
  const int64_t place = coord[mesh::Axis::kDpReplicate] * ways.shard +
                        coord[mesh::Axis::kDpShard];
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor mine = rows_of(net, step).narrow(0, place * share, share);
    for (int64_t m = 0; m < ways.microbatches; ++m) {
      const auto loss =
          loss_of(model.forward(mine.narrow(0, m * micro, micro))) /
          ways.microbatches;
      if (m + 1 < ways.microbatches) {
        model.accumulate(loss);
      } else {
        ways.own_backward ? loss.backward() : model.backward(loss);
      }
    }
    model.clip_grad_norm(0.5);
    optimizer.step();
  }
  const auto whole = model.gather();
  return values_of(*net);
}

// On as many threads as there are ranks, which all end with the same.
inline Values many_ranks(const Kind& kind, const Ways& ways) {
  std::vector<Values> results(ways.world());
  comm::run_threads(ways.world(), "shm", [&](comm::Communicator& ranks) {
    results[ranks.rank()] = trained(ranks, kind, ways);
  });
  for (const auto& result : results) {
    for (size_t i = 0; i < result.size(); ++i) {
      EXPECT_TRUE(at::equal(result[i], results[0][i]));
    }
  }
  return results[0];
}

}  // namespace tessera::tests
