// fully_shard on modules drawn by a seed, against one rank, in double.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <random>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/wrappers/deferred_init.h"
#include "tessera/wrappers/fully_shard.h"
#include "tessera/wrappers/parallelize.h"
#include "tests/support/own_modules.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using tests::expect_equal;
using tests::loss_of;
using tests::share_like;
using tests::Values;
using tests::values_of;

constexpr int64_t kWidth = 7, kSteps = 3;

struct Draw {
  std::mt19937 random;
  explicit Draw(uint64_t seed) : random(seed) {}
  int64_t below(int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n - 1)(random);
  }
  bool chance(int percent) { return below(100) < percent; }
};

// Widths, biases and a scalar by chance; sometimes another's inner layer.
struct PartImpl : nn::Module {
  nn::Linear up{nullptr}, down{nullptr};
  at::Tensor scale;
  PartImpl(Draw& draw, const nn::Linear& shared) {
    const int64_t hidden = 1 + draw.below(9);
    up = shared.is_empty()
             ? nn::Linear(
                   nn::LinearOptions(kWidth, hidden).bias(draw.chance(50)))
             : shared;
    down = nn::Linear(nn::LinearOptions(up->options.out_features(), kWidth)
                          .bias(draw.chance(50)));
    register_module("up", up);
    register_module("down", down);
    if (draw.chance(30)) {
      scale = register_parameter("scale", torch::tensor(0.5));
    }
    if (draw.chance(20)) up->weight.requires_grad_(false);
    if (draw.chance(10)) {
      for (auto& p : parameters()) p.requires_grad_(false);
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = down->forward(at::tanh(up->forward(x)));
    return scale.defined() ? y * scale : y;
  }
};
TORCH_MODULE(Part);

struct DrawnImpl : nn::Module {
  nn::Linear in{5, kWidth};
  nn::ModuleList parts;
  std::vector<std::vector<int64_t>> taken;  // by data: the order of its parts
  int64_t rank = 0;
  bool reads_first_twice = false;  // its weight, as the head

  DrawnImpl(uint64_t seed, int64_t data) {
    Draw draw(seed);
    register_module("in", in);
    register_module("parts", parts);
    const int64_t count = 1 + draw.below(4);
    for (int64_t i = 0; i < count; ++i) {
      const bool shares = i > 0 && draw.chance(20);
      parts->push_back(Part(draw, shares ? parts[i - 1]->as<PartImpl>()->up
                                         : nn::Linear(nullptr)));
    }
    reads_first_twice = draw.chance(50);
    std::vector<int64_t> order;
    for (int64_t i = 0; i < count + draw.below(3); ++i) {
      order.push_back(draw.below(count));
    }
    taken.assign(data, order);
    for (auto& each : taken) {
      if (draw.chance(30) && !each.empty()) each.erase(each.begin());
    }
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    auto generator = at::detail::createCPUGenerator(seed);
    for (auto& p : parameters()) p.normal_(0, 0.4, generator);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto h = in->forward(x);
    for (int64_t i : taken[rank]) {
      h = h + parts[i]->as<PartImpl>()->forward(h);
    }
    return reads_first_twice ? at::linear(h, in->weight.t()) : h;
  }
  // What of it divides by `tp`, and has one place.
  ParallelPlan plan(int64_t tp) {
    ParallelPlan plan;
    for (size_t i = 0; i < parts->size(); ++i) {
      const auto& up = parts[i]->as<PartImpl>()->up;
      const auto uses = std::ranges::count_if(*parts, [&](const auto& other) {
        return other->template as<PartImpl>()->up.ptr() == up.ptr();
      });
      if (uses > 1 || up->options.out_features() % tp != 0) continue;
      plan.push_back({c10::str("parts.", i, ".up"), ParallelStyle::column()});
      plan.push_back({c10::str("parts.", i, ".down"), ParallelStyle::row()});
    }
    return plan;
  }
};
TORCH_MODULE(Drawn);

at::Tensor rows_of(int64_t rank, int64_t step, int64_t microbatch) {
  const auto all = at::arange(15, at::kDouble).view({3, 5});
  return (all * 0.3 + static_cast<double>(rank + 3 * step) + 0.5 * microbatch)
      .sin();
}

struct Chosen {
  int64_t replicate, shard, tp, stage, microbatches;
  bool reshard, prefetch, all_units, deferred;
  explicit Chosen(uint64_t seed) {
    Draw draw(seed + 1000);
    replicate = 1 + draw.below(2);
    shard = 2 + draw.below(replicate == 2 ? 1 : 3);
    stage = draw.below(4);
    microbatches = 1 + draw.below(2);
    reshard = draw.chance(50);
    prefetch = draw.chance(50);
    all_units = draw.chance(30);
    tp = replicate == 1 && shard == 2 && draw.chance(50) ? 2 : 1;
    deferred = tp == 1 && draw.chance(30);
  }
  int64_t data() const { return replicate * shard; }
  int64_t world() const { return data() * tp; }
};

Values alone(uint64_t seed, const Chosen& chosen) {
  Drawn net(seed, chosen.data());
  torch::optim::AdamW optimizer(net->parameters(),
                                torch::optim::AdamWOptions(1e-2));
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (net->rank = 0; net->rank < chosen.data(); ++net->rank) {
      for (int64_t m = 0; m < chosen.microbatches; ++m) {
        (loss_of(net->forward(rows_of(net->rank, step, m))) / chosen.data())
            .backward();
      }
    }
    optimizer.step();
  }
  return values_of(*net);
}

// Of rank 0: its share, where there is a tp.
Values sharded(uint64_t seed, const Chosen& chosen) {
  const mesh::DeviceMesh mesh({.dp_replicate = chosen.replicate,
                               .dp_shard = chosen.shard,
                               .tp = chosen.tp},
                              chosen.world());
  Values result;
  comm::run_threads(chosen.world(), "shm", [&](comm::Communicator& ranks) {
    Drawn net{nullptr};
    DeferredInit deferred;
    comm::in_turn(ranks.world(), [&] {
      const auto draw = [&] { return Drawn(seed, chosen.data()); };
      net = chosen.deferred ? deferred.make(draw) : draw();
    });
    net->rank = ranks.rank() / chosen.tp;
    std::optional<Parallelized> parallel;
    const ParallelPlan plan = net->plan(chosen.tp);
    if (chosen.tp > 1 && !plan.empty()) {
      parallel.emplace(*net, mesh, ranks, plan);
    }
    FullyShardOptions options{
        .zero_stage = chosen.stage,
        .reshard_after_forward = chosen.reshard,
        .prefetch = chosen.prefetch ? 2 : 0,
        .deferred = chosen.deferred ? &deferred : nullptr};
    if (chosen.all_units) {
      for (const auto& each : net->named_modules("", /*include_self=*/false)) {
        if (each.value()->parameters().empty()) continue;
        options.units.push_back(each.key());
      }
    }
    auto model = fully_shard(net, mesh, ranks, options);
    torch::optim::AdamW optimizer(net->parameters(),
                                  torch::optim::AdamWOptions(1e-2));
    for (int64_t step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      for (int64_t m = 0; m < chosen.microbatches; ++m) {
        const auto loss = loss_of(model.forward(rows_of(net->rank, step, m)));
        m + 1 < chosen.microbatches ? model.accumulate(loss)
                                    : model.backward(loss);
      }
      optimizer.step();
    }
    const auto whole = model.gather();
    if (ranks.rank() == 0) result = values_of(*net);
  });
  return result;
}

TEST(FullyShardSlow, DrawnModulesEqualOneRank) {
  for (uint64_t seed = 0; seed < 250; ++seed) {
    const Chosen chosen(seed);
    SCOPED_TRACE(c10::str("seed ", seed, " stage ", chosen.stage, " ",
                          chosen.replicate, "x", chosen.shard, " tp ",
                          chosen.tp, " deferred ", chosen.deferred));
    Values wanted = alone(seed, chosen);
    const Values found = sharded(seed, chosen);
    ASSERT_EQ(found.size(), wanted.size());
    for (size_t i = 0; i < found.size(); ++i) {
      wanted[i] = share_like(wanted[i], found[i], chosen.tp, /*rank=*/0);
    }
    expect_equal(found, wanted, 1e-10);
  }
}

}  // namespace
}  // namespace tessera
