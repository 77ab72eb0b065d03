// Plans and the two linears against one rank, in double.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/wrappers/distributed_data_parallel.h"
#include "tessera/wrappers/fully_shard.h"
#include "tessera/wrappers/parallelize.h"
#include "tests/support/failure_of_ranks.h"

namespace tessera {
namespace {

namespace nn = torch::nn;

constexpr int64_t kWidth = 16, kHead = 4, kVocabulary = 12, kLength = 8;

// Heads are counted from the width that is there.
struct BlockImpl : nn::Module {
  nn::LayerNorm before{nn::LayerNormOptions({kWidth})};
  nn::LayerNorm between{nn::LayerNormOptions({kWidth})};
  nn::Linear q{kWidth, kWidth}, k{kWidth, kWidth}, v{kWidth, kWidth};
  nn::Linear out{kWidth, kWidth}, up{kWidth, 24}, down{24, kWidth};
  BlockImpl() {
    register_module("before", before);
    register_module("between", between);
    register_module("q", q);
    register_module("k", k);
    register_module("v", v);
    register_module("out", out);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto n = before->forward(x);
    const auto heads = [](const at::Tensor& y) {
      return y.unflatten(-1, {-1, kHead}).transpose(1, 2);
    };
    const auto mixed = at::scaled_dot_product_attention(
        heads(q->forward(n)), heads(k->forward(n)), heads(v->forward(n)), {},
        0.0, true);
    const auto h = x + out->forward(mixed.transpose(1, 2).flatten(-2));
    return h + down->forward(at::gelu(up->forward(between->forward(h))));
  }
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  nn::Embedding tokens{kVocabulary, kWidth};
  nn::ModuleList blocks;
  nn::LayerNorm last{nn::LayerNormOptions({kWidth})};
  nn::Linear head{nn::LinearOptions(kWidth, kVocabulary).bias(false)};
  explicit GptImpl(uint64_t seed = 1) {
    register_module("tokens", tokens);
    register_module("blocks", blocks);
    for (int i = 0; i < 2; ++i) blocks->push_back(Block());
    register_module("last", last);
    register_module("head", head);
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    auto generator = at::detail::createCPUGenerator(seed);
    for (auto& p : parameters()) p.normal_(0, 0.3, generator);
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto h = tokens->forward(ids);
    for (const auto& block : *blocks) h = block->as<BlockImpl>()->forward(h);
    return head->forward(last->forward(h));
  }
};
TORCH_MODULE(Gpt);

using Style = ParallelStyle;

ParallelPlan plan() {
  return {{"blocks.*.[qkv]", Style::column()},
          {"blocks.*.out", Style::row()},
          {"blocks.*.up", Style::column()},
          {"blocks.*.down", Style::row()},
          {"tokens", Style::vocabulary()},
          {"head", Style::column(Lies::kWhole, Lies::kWhole)}};
}

// Norms, and what lies between blocks, by sequence.
ParallelPlan plan_by_sequence() {
  return {{"blocks.*.[qkv]", Style::column(Lies::kBySequence)},
          {"blocks.*.out", Style::row(Lies::kByFeatures, Lies::kBySequence)},
          {"blocks.*.up", Style::column(Lies::kBySequence)},
          {"blocks.*.down", Style::row(Lies::kByFeatures, Lies::kBySequence)},
          {"blocks.*.be[ft]*", Style::sequence()},
          {"last", Style::sequence()},
          {"tokens", Style::vocabulary(Lies::kBySequence)},
          {"head", Style::column(Lies::kBySequence, Lies::kWhole)}};
}

at::Tensor ids_of(int64_t samples, int64_t step) {
  return at::arange(samples * (kLength + 1))
      .mul(7 + step)
      .remainder(kVocabulary)
      .view({samples, kLength + 1});
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& ids) {
  return at::cross_entropy_loss(logits.flatten(0, 1),
                                ids.narrow(1, 1, kLength).flatten());
}

constexpr int64_t kSamples = 4;
constexpr int kSteps = 5;

std::vector<double> one_rank(Gpt& gpt) {
  std::vector<double> losses;
  torch::optim::AdamW optimizer(gpt->parameters(),
                                torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kSteps; ++step) {
    const auto ids = ids_of(kSamples, step);
    const auto loss = loss_of(gpt->forward(ids.narrow(1, 0, kLength)), ids);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

void expect_equal(const at::Tensor& found, const at::Tensor& wanted,
                  const std::string& name) {
  ASSERT_EQ(found.sizes(), wanted.sizes()) << name;
  EXPECT_LE((found - wanted).norm().item<double>(),
            1e-10 * wanted.norm().item<double>())
      << name;
}

// Its share of what one rank has: of a dim that is `ranks` times as long.
at::Tensor share_like(const at::Tensor& whole, const at::Tensor& mine,
                      comm::Group& tp) {
  for (int64_t dim = 0; dim < whole.dim(); ++dim) {
    if (whole.size(dim) != mine.size(dim)) {
      return whole.chunk(tp.size(), dim)[tp.rank()];
    }
  }
  return whole;
}

TEST(Parallelize, EqualsOneRank) {
  Gpt alone(1);
  const auto wanted = one_rank(alone);
  for (const auto& [dp, tp] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 2}, {1, 4}, {2, 2}}) {
    for (const bool by_sequence : {false, true}) {
      SCOPED_TRACE(c10::str("dp ", dp, " tp ", tp, " ", by_sequence));
      const mesh::DeviceMesh mesh({.dp_replicate = dp, .tp = tp}, dp * tp);
      comm::run_threads(dp * tp, "shm", [&](comm::Communicator& ranks) {
        Gpt gpt{nullptr};
        comm::in_turn(ranks.world(), [&] { gpt = Gpt(1 + ranks.rank() % tp); });
        const auto parallel = parallelize(
            *gpt, mesh, ranks, by_sequence ? plan_by_sequence() : plan());
        const auto along = [&](mesh::Axis axis, const char* name) {
          return ranks.make_group(mesh.peers(ranks.rank(), {axis}), name);
        };
        comm::Group& data = *along(mesh::Axis::kDpReplicate, "dp");
        comm::Group& tensor = *along(mesh::Axis::kTp, "tp");
        DistributedDataParallel model(gpt, data);
        torch::optim::AdamW optimizer(gpt->parameters(),
                                      torch::optim::AdamWOptions(1e-2));
        const int64_t share = kSamples / dp;
        for (int step = 0; step < kSteps; ++step) {
          const auto ids =
              ids_of(kSamples, step).narrow(0, data.rank() * share, share);
          auto loss = loss_of(model.forward(ids.narrow(1, 0, kLength)), ids);
          optimizer.zero_grad();
          loss.backward();
          optimizer.step();
          at::Tensor mean = loss.detach().clone();
          data.all_reduce(mean, comm::ReduceOp::kMean).wait();
          EXPECT_NEAR(mean.item<double>(), wanted[step], 1e-10);
        }
        for (const auto& item : gpt->named_parameters()) {
          const at::Tensor& whole = alone->named_parameters()[item.key()];
          expect_equal(item.value().detach(),
                       share_like(whole.detach(), item.value(), tensor),
                       item.key());
        }
      });
    }
  }
}

TEST(Parallelize, GoesWithFullyShard) {
  Gpt alone(1);
  torch::optim::AdamW optimizer(alone->parameters(),
                                torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kSteps; ++step) {
    const auto ids = ids_of(kSamples, step);
    optimizer.zero_grad();
    loss_of(alone->forward(ids.narrow(1, 0, kLength)), ids).backward();
    nn::utils::clip_grad_norm_(alone->parameters(), 0.1);
    optimizer.step();
  }
  for (const int64_t stage : {1, 2, 3}) {
    for (const bool by_sequence : {false, true}) {
      SCOPED_TRACE(c10::str("stage ", stage, " ", by_sequence));
      const mesh::DeviceMesh mesh({.dp_shard = 2, .tp = 2}, 4);
      comm::run_threads(4, "shm", [&](comm::Communicator& ranks) {
        Gpt gpt(1);
        const auto parallel = parallelize(
            *gpt, mesh, ranks, by_sequence ? plan_by_sequence() : plan());
        auto model = fully_shard(gpt, mesh, ranks, {.zero_stage = stage});
        torch::optim::AdamW mine(gpt->parameters(),
                                 torch::optim::AdamWOptions(1e-2));
        const int64_t data = mesh.coord_of(ranks.rank())[mesh::Axis::kDpShard];
        for (int step = 0; step < kSteps; ++step) {
          const auto ids =
              ids_of(kSamples, step).narrow(0, data * kSamples / 2, 2);
          mine.zero_grad();
          loss_of(model.forward(ids.narrow(1, 0, kLength)), ids).backward();
          model.clip_grad_norm(0.1);
          mine.step();
        }
        comm::Group& tp = *ranks.make_group(
            mesh.peers(ranks.rank(), {mesh::Axis::kTp}), "tp");
        const auto whole = model.gather();
        for (const auto& item : gpt->named_parameters()) {
          const at::Tensor& wanted = alone->named_parameters()[item.key()];
          expect_equal(item.value().detach(),
                       share_like(wanted.detach(), item.value(), tp),
                       item.key());
        }
      });
    }
  }
}

// Worked examples: W split by rows and by columns, in all layouts.
TEST(ParallelLinear, LayoutsOfTheTwoLinears) {
  for (int64_t ranks : {1, 2, 3}) {
    comm::run_threads(ranks, "shm", [](comm::Communicator& all) {
      comm::Group& group = all.world();
      nn::Linear whole{nullptr};
      ColumnParallelLinear gathering{nullptr};
      RowParallelLinear splitting{nullptr};
      comm::in_turn(group, [&] {
        torch::manual_seed(0);
        whole = nn::Linear(6, 12);
        whole->to(at::kDouble);
      });
      const auto x = at::arange(24, at::kDouble).sin().view({4, 6});
      const auto weight_of = [&](const Style& style) {
        const at::Tensor& w = whole->weight;
        const int64_t dim = style.weight_dim();
        return w.detach()
            .chunk(group.size(), dim)[group.rank()]
            .clone()
            .requires_grad_();
      };
      const auto wanted_x = x.clone().requires_grad_();
      const auto wanted = whole->forward(wanted_x);
      wanted.pow(2).sum().backward();
      const auto check = [&](const Style& style, const at::Tensor& bias,
                             bool input_is_whole) {
        const auto w = weight_of(style);
        const auto mine =
            (input_is_whole ? x : x.chunk(group.size(), 1)[group.rank()])
                .clone()
                .requires_grad_();
        const auto y = parallel_linear(mine, w, bias, style, group);
        expect_equal(y.detach(), wanted.detach(), "y");
        y.pow(2).sum().backward();
        const int64_t dim = style.weight_dim();
        expect_equal(
            w.grad(),
            whole->weight.grad().chunk(group.size(), dim)[group.rank()], "dw");
        expect_equal(mine.grad(),
                     input_is_whole
                         ? wanted_x.grad()
                         : wanted_x.grad().chunk(group.size(), 1)[group.rank()],
                     "dx");
      };
      const auto bias = whole->bias.detach();
      check(Style::column(Lies::kWhole, Lies::kWhole),
            bias.chunk(group.size())[group.rank()], true);
      check(Style::row(Lies::kWhole, Lies::kWhole), bias, true);
      check(Style::row(Lies::kByFeatures, Lies::kWhole), bias, false);
    });
  }
}

// A = [A1 A2] by columns, B = [B1; B2] by rows.
TEST(ParallelLinear, AreModules) {
  comm::run_threads(2, "shm", [](comm::Communicator& all) {
    comm::Group& group = all.world();
    ColumnParallelLinear up{nullptr};
    RowParallelLinear down{nullptr};
    // The same numbers on both, which are threads and make them together.
    up = ColumnParallelLinear(nn::LinearOptions(6, 8), group);
    down = RowParallelLinear(nn::LinearOptions(8, 6).bias(false), group);
    EXPECT_THAT(up->weight.sizes(), ::testing::ElementsAre(4, 6));
    EXPECT_THAT(up->bias.sizes(), ::testing::ElementsAre(4));
    EXPECT_THAT(down->weight.sizes(), ::testing::ElementsAre(6, 4));
    const auto x = at::arange(12).to(at::kFloat).view({2, 6}).requires_grad_();
    const auto y = down->forward(at::relu(up->forward(x)));
    y.sum().backward();
    for (const at::Tensor& mine : {y.detach(), x.grad()}) {
      at::Tensor other = mine.clone();
      group.all_reduce(other, comm::ReduceOp::kMean).wait();
      EXPECT_TRUE(at::allclose(mine, other));
    }
  });
}

std::string error_of(const ParallelPlan& with,
                     const std::function<void(Gpt&)>& use = {}) {
  const mesh::DeviceMesh mesh({.tp = 2}, 2);
  return testing::failure_of_ranks(2, [&](comm::Communicator& ranks) {
    Gpt gpt(1);
    const auto parallel = parallelize(*gpt, mesh, ranks, with);
    if (use) use(gpt);
  });
}

TEST(Parallelize, RefusesWhatWouldBeWrong) {
  using ::testing::HasSubstr;
  EXPECT_THAT(error_of({{"block.*.up", Style::column()}}),
              HasSubstr("\"block.*.up\" names no child module that has "
                        "parameters; the nearest is \"blocks."));
  EXPECT_THAT(error_of({{"blocks.*.[q]", Style::column()},
                        {"blocks.1.[qu]*", Style::column()}}),
              HasSubstr("\"blocks.1.q\" is named by two lines of the plan"));
  EXPECT_THAT(error_of({{"last", Style::column()}}),
              HasSubstr("\"last\" is a"));
  EXPECT_THAT(error_of({{"head", Style::row(Lies::kBySequence)}}),
              HasSubstr("a row linear takes features of all of the sequence"));
  EXPECT_THAT(error_of({{"blocks.*.out", Style::row()}},
                       [](Gpt& gpt) {
                         at::linear(
                             at::ones({2, kWidth}, at::kDouble),
                             gpt->blocks[0]->as<BlockImpl>()->out->weight.t());
                       }),
              HasSubstr("\"blocks.0.out\" computes aten::linear with a "
                        "parameter of which this rank has a share"));
  EXPECT_THAT(error_of({{"blocks.*.out", Style::row()}},
                       [](Gpt& gpt) {
                         at::matmul(
                             gpt->blocks[0]->as<BlockImpl>()->out->weight,
                             at::ones({kWidth, 8}, at::kDouble).t());
                       }),
              HasSubstr("\"blocks.0.out\" computes aten::matmul"));
  EXPECT_THAT(error_of(plan(), [](Gpt& gpt) { gpt->head->weight.sum(); }),
              HasSubstr("\"head\" computes aten::sum with a parameter of "
                        "which this rank has a share"));
}

TEST(Parallelize, OtherProductsAreRefused) {
  using ::testing::HasSubstr;
  const auto x = at::ones({2, kWidth}, at::kDouble);
  const auto of_up = [&](const std::function<void(const nn::Linear&)>& use) {
    return error_of(
        plan(), [&](Gpt& gpt) { use(gpt->blocks[0]->as<BlockImpl>()->up); });
  };
  // Scaled, or added to what is no bias.
  EXPECT_THAT(of_up([&](const nn::Linear& up) {
                at::addmm(up->bias, x, up->weight.t(), 1, 0.5);
              }),
              HasSubstr("\"blocks.0.up\" computes aten::addmm"));
  for (const bool records : {true, false}) {
    EXPECT_THAT(of_up([&](const nn::Linear& up) {
                  const at::AutoGradMode mode(records);
                  at::addmm(at::ones({2, 12}, at::kDouble), x, up->weight.t());
                }),
                HasSubstr("\"blocks.0.up\" computes aten::addmm"));
  }
  EXPECT_THAT(of_up([&](const nn::Linear& up) {
                const at::NoGradGuard no_grad;
                at::Tensor y = at::empty({2, 12}, at::kDouble);
                at::mm_out(y, x, up->weight.t());
              }),
              HasSubstr("\"blocks.0.up\" computes aten::mm"));
  EXPECT_EQ(of_up([&](const nn::Linear& up) {
              at::addmm(up->bias, x, up->weight.t());
            }),
            "");
}

constexpr int64_t kIds = 12;

nn::Embedding embedding(const nn::EmbeddingOptions& options) {
  nn::Embedding made(options);
  made->to(at::kDouble);
  const at::NoGradGuard no_grad;
  made->weight.copy_(at::arange(kIds * 3, at::kDouble).sin().view({kIds, 3}));
  return made;
}

std::string error_of_embedding(const nn::EmbeddingOptions& options,
                               int64_t id = 0) {
  return testing::failure_of_ranks(2, [&](comm::Communicator& ranks) {
    nn::Sequential net(embedding(options));
    const auto parallel = parallelize(*net, mesh::DeviceMesh({.tp = 2}, 2),
                                      ranks, {{"0", Style::vocabulary()}});
    net->forward(at::full({1}, id, at::kLong));
  });
}

// Of the first entries, the last ones, and those between.
TEST(Parallelize, AnEntryThatPadsHasNoGradient) {
  const auto ids = at::arange(2 * kIds).remainder(kIds).view({2, kIds});
  for (const int64_t padding : {0, 5, 11, -1, -12}) {
    SCOPED_TRACE(padding);
    const auto options = nn::EmbeddingOptions(kIds, 3).padding_idx(padding);
    auto alone = embedding(options);
    alone->forward(ids).pow(2).sum().backward();
    comm::run_threads(4, "shm", [&](comm::Communicator& ranks) {
      auto mine = embedding(options);
      nn::Sequential net(mine);
      const auto parallel = parallelize(*net, mesh::DeviceMesh({.tp = 4}, 4),
                                        ranks, {{"0", Style::vocabulary()}});
      const at::Tensor y = net->forward(ids);
      expect_equal(y.detach(), alone->forward(ids).detach(), "y");
      y.pow(2).sum().backward();
      expect_equal(mine->weight.grad(),
                   alone->weight.grad().chunk(4)[ranks.rank()], "dw");
    });
  }
}

TEST(Parallelize, EmbeddingsThatNoShareCanBeAreRefused) {
  using ::testing::HasSubstr;
  const nn::EmbeddingOptions plain(kIds, 3);
  const auto refused = HasSubstr("\"0\" has scale_grad_by_freq, max_norm");
  EXPECT_THAT(
      error_of_embedding(nn::EmbeddingOptions(plain).scale_grad_by_freq(true)),
      refused);
  EXPECT_THAT(error_of_embedding(nn::EmbeddingOptions(plain).max_norm(1.0)),
              refused);
  EXPECT_THAT(error_of_embedding(nn::EmbeddingOptions(plain).sparse(true)),
              refused);
  EXPECT_EQ(error_of_embedding(plain, kIds - 1), "");
  for (const int64_t id : {int64_t{-1}, kIds}) {
    EXPECT_THAT(error_of_embedding(plain, id), HasSubstr("index out of range"));
  }
}

// A weight of one row lies as one of one column does.
TEST(Parallelize, SharesMayBeOfOneFeature) {
  const mesh::DeviceMesh mesh({.tp = 2}, 2);
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    const auto made = [&] {
      nn::Sequential net{nullptr};
      comm::in_turn(ranks.world(), [&] {
        torch::manual_seed(3);
        net = nn::Sequential(nn::Linear(5, 2), nn::Linear(2, 3));
        net->to(at::kDouble);
      });
      return net;
    };
    nn::Sequential alone = made(), net = made();
    const auto parallel = parallelize(
        *net, mesh, ranks, {{"0", Style::column()}, {"1", Style::row()}});
    for (const auto& shape : {std::vector<int64_t>{4, 5}, {2, 3, 5}}) {
      const auto x = at::ones(shape, at::kDouble).cumsum(0);
      expect_equal(net->forward(x).detach(), alone->forward(x).detach(), "y");
    }
  });
}

// Of a column, a row and a vocabulary: shares that would not be equal.
TEST(Parallelize, RefusesUnevenSharesByName) {
  const auto error_on = [](int64_t tp, const ParallelPlan& with) {
    std::string message;
    try {
      comm::run_threads(tp, "shm", [&](comm::Communicator& ranks) {
        Gpt gpt(1);
        parallelize(*gpt, mesh::DeviceMesh({.tp = tp}, tp), ranks, with);
      });
    } catch (const std::exception& error) {
      message = message_of(error);
    }
    return message;
  };
  using ::testing::HasSubstr;
  const std::string rule = " does not divide by the ";
  EXPECT_THAT(error_on(3, {{"blocks.1.q", Style::column()}}),
              HasSubstr("dim 0 of blocks.1.q.weight [16, 16]" + rule + "3 "));
  EXPECT_THAT(
      error_on(5, {{"blocks.*.down", Style::row()}}),
      HasSubstr("dim 1 of blocks.0.down.weight [16, 24]" + rule + "5 "));
  EXPECT_THAT(error_on(5, {{"tokens", Style::vocabulary()}}),
              HasSubstr("dim 0 of tokens.weight [12, 16]" + rule +
                        "5 ranks along tp. Use another tp"));
}

}  // namespace
}  // namespace tessera
