#include "tessera/wrappers/pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/program/schedules/schedule.h"
#include "tessera/wrappers/pipe.h"
#include "tests/support/failure_of_ranks.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;

constexpr int64_t kRows = 24, kSteps = 3;

// Widths that differ, so that messages do; a child without parameters, one
// that is frozen.
nn::Sequential make_net() {
  torch::manual_seed(5);
  nn::Sequential net(nn::Linear(6, 9), nn::Tanh(), nn::Linear(9, 7),
                     nn::LayerNorm(nn::LayerNormOptions({7})), nn::Tanh(),
                     nn::Linear(7, 11), nn::Linear(11, 5), nn::Tanh(),
                     nn::Linear(5, 8), nn::Linear(8, 4));
  net->to(at::kDouble);
  net->named_parameters()["6.bias"].requires_grad_(false);
  return net;
}

at::Tensor numbers(int64_t rows, int64_t columns, double by) {
  return at::arange(rows * columns, at::kDouble)
      .mul(by)
      .sin()
      .view({rows, columns});
}
at::Tensor inputs_of(int64_t step) { return numbers(kRows, 6, 0.37 + step); }
at::Tensor targets_of(int64_t step) { return numbers(kRows, 4, 0.61 + step); }

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}

struct Trained {
  std::map<std::string, at::Tensor> parameters;
  at::Tensor output;
  double loss = 0;
};

Trained unsplit() {
  auto net = make_net();
  torch::optim::Adam optimizer(net->parameters(), 1e-2);
  Trained run;
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    run.output = net->forward(inputs_of(step));
    const auto loss = loss_of(run.output, targets_of(step));
    loss.backward();
    optimizer.step();
    run.loss = loss.item<double>();
  }
  for (const auto& each : net->named_parameters()) {
    run.parameters[each.key()] = each.value().detach();
  }
  return run;
}

nn::Sequential net_in_turn(comm::Communicator& ranks) {
  nn::Sequential net{nullptr};
  comm::in_turn(ranks.world(), [&] { net = make_net(); });
  return net;
}

void expect_as_unsplit(const Trained& wanted, int64_t ranks,
                       const ScheduleOptions& options, int64_t chunks) {
  comm::run_threads(ranks, "shm", [&](comm::Communicator& communicator) {
    auto& world = communicator.world();
    Pipe pipe(net_in_turn(communicator), world, options, chunks,
              CutBy::kChildren);
    torch::optim::Adam optimizer(pipe.parameters(), 1e-2);
    Schedule::Result result;
    for (int64_t step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      result = pipe.step(inputs_of(step), targets_of(step));
      optimizer.step();
    }
    EXPECT_NEAR(result.loss, wanted.loss, 1e-12);
    EXPECT_EQ(result.output.defined(), pipe.schedule().is_last());
    if (result.output.defined()) {
      EXPECT_TRUE(at::allclose(result.output, wanted.output, 1e-10, 1e-12));
    }
    for (const auto& part : pipe.parts()) {
      for (const auto& each : part->named_parameters()) {
        EXPECT_TRUE(at::allclose(each.value(), wanted.parameters.at(each.key()),
                                 1e-10, 1e-12))
            << each.key();
      }
    }
  });
}

TEST(Pipeline, EveryScheduleTrainsWhatTheUnsplitModuleDoes) {
  const Trained wanted = unsplit();
  for (const auto& schedule : program::schedules::all()) {
    if (schedule.placement == program::Placement::kMirrored ||
        schedule.delayed) {
      continue;
    }
    for (const int64_t ranks : {1, 2, 3, 4}) {
      for (const int64_t m : {1, 2, 4, 6, 12}) {
        const int64_t chunks = schedule.chunked ? 2 : 1;
        const program::schedules::Shape shape{
            .stages = ranks, .chunks = chunks, .num_microbatches = m};
        if (ranks * chunks > 10 || !takes(schedule, shape)) continue;
        const ScheduleOptions options{
            .schedule = schedule.name, .num_microbatches = m, .loss = loss_of};
        EXPECT_NO_THROW(expect_as_unsplit(wanted, ranks, options, chunks))
            << schedule.name << " on " << ranks << ", m " << m;
      }
    }
  }
}

// Two pipelines of two ranks, each with half of the samples.
TEST(Pipeline, WithReplicas) {
  const Trained wanted = unsplit();
  comm::run_threads(4, "shm", [&](comm::Communicator& ranks) {
    const int64_t replica = ranks.rank() / 2, stage = ranks.rank() % 2;
    const auto pipeline =
        ranks.make_group({2 * replica, 2 * replica + 1}, "pp");
    const auto replicas = ranks.make_group({stage, stage + 2}, "dp");
    Pipe pipe(net_in_turn(ranks), *pipeline,
              {.num_microbatches = 3, .loss = loss_of, .replicas = &*replicas});
    torch::optim::Adam optimizer(pipe.parameters(), 1e-2);
    const auto half = [&](const at::Tensor& batch) {
      return batch.narrow(0, replica * kRows / 2, kRows / 2);
    };
    int64_t trained = 0;  // by this stage
    for (const auto& each : pipe.parameters()) trained += each.requires_grad();
    for (int64_t step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      replicas->reset_stats();
      pipe.step(half(inputs_of(step)), half(targets_of(step)));
      // One reduction of each, whatever its micro-batches.
      int64_t reductions = 0;
      for (const auto& verb : replicas->stats()) {
        EXPECT_EQ(verb.verb, "all_reduce");
        reductions += verb.calls;
      }
      EXPECT_EQ(reductions, trained);
      optimizer.step();
    }
    for (const auto& each : pipe.parts().front()->named_parameters()) {
      EXPECT_TRUE(at::allclose(each.value(), wanted.parameters.at(each.key()),
                               1e-10, 1e-12))
          << each.key();
    }
  });
}

TEST(Pipeline, ForwardAloneAndOtherSizes) {
  auto net = make_net();
  const at::NoGradGuard no_grad;
  comm::run_threads(3, "shm", [&](comm::Communicator& ranks) {
    Pipe pipe(net_in_turn(ranks), ranks.world(),
              {.schedule = "gpipe", .num_microbatches = 4, .loss = loss_of});
    for (const int64_t rows : {8, 8, 24, 12}) {
      const at::Tensor x = numbers(rows, 6, 0.3), y = numbers(rows, 4, 0.2);
      const auto found = pipe.eval(x, y);
      const at::Tensor wanted = net->forward(x);
      EXPECT_NEAR(found.loss, loss_of(wanted, y).item<double>(), 1e-12);
      if (pipe.schedule().is_last()) {
        EXPECT_TRUE(at::allclose(found.output, wanted, 1e-12, 1e-14));
      }
      EXPECT_TRUE(std::isnan(pipe.eval(x).loss));
    }
    for (const auto& each : pipe.parameters()) {
      EXPECT_FALSE(each.grad().defined());
    }
  });
}

// Two segments of 6.3 M parameters, four micro-batches of four rows.
TEST(Pipeline, TheUsualExampleOfPipe) {
  comm::run_threads(2, "shm", [](comm::Communicator& ranks) {
    nn::Sequential net{nullptr};
    comm::in_turn(ranks.world(), [&] {
      torch::manual_seed(0);
      net = nn::Sequential(nn::Linear(1024, 2048), nn::ReLU(),
                           nn::Linear(2048, 2048), nn::Linear(2048, 2048),
                           nn::ReLU(), nn::Linear(2048, 1024));
    });
    const at::Tensor x = torch::ones({16, 1024}) / 32;
    const at::Tensor wanted = net->forward(x);
    Pipe pipe(net, ranks.world(), {.num_microbatches = 4, .loss = loss_of});
    int64_t parameters = 0;
    for (const auto& each : pipe.parameters()) parameters += each.numel();
    EXPECT_EQ(parameters, ranks.rank() == 0 ? 6'295'552 : 6'294'528);
    pipe.eval(x);  // shapes are known
    ranks.world().reset_stats();
    // The batch on the first rank alone, its targets on the last.
    const auto found = ranks.rank() == 0 ? pipe.step(x, {})
                                         : pipe.step({}, at::zeros({16, 1024}));
    int64_t sends = 0;
    for (const auto& verb : ranks.world().stats()) {
      if (verb.verb != "send") continue;
      sends += verb.calls;
      EXPECT_EQ(verb.bytes, 4 * 32'768);
    }
    EXPECT_EQ(sends, 4);
    if (ranks.rank() == 0) return;
    EXPECT_EQ(found.output.sizes(), (std::vector<int64_t>{16, 1024}));
    EXPECT_TRUE(at::allclose(found.output, wanted, 1e-4, 1e-6));
  });
}

TEST(Pipeline, SplitKeepsNamesAndSharesOut) {
  const auto parts = split(make_net(), 3, CutBy::kChildren);
  std::vector<std::string> names;
  for (const auto& part : parts) {
    names.push_back(part->named_parameters().back().key());
  }
  EXPECT_EQ(names, (std::vector<std::string>{"3.bias", "6.bias", "9.bias"}));
  EXPECT_EQ(split(make_net(), {1, 9})[1]->named_children().front().key(), "1");
}

TEST(Pipeline, SplitLeavesChildrenInTheirMode) {
  nn::Sequential net(nn::Linear(3, 3), nn::BatchNorm1d(3), nn::Linear(3, 3));
  net->ptr(1)->eval();
  const auto parts = split(net, std::vector<int64_t>{1, 2});
  EXPECT_FALSE(net->ptr(1)->is_training());
  EXPECT_TRUE(net->ptr(2)->is_training());
  EXPECT_TRUE(parts[1]->is_training());
}

// A stage's input is a leaf of autograd, which nothing may write to.
TEST(Pipeline, AStageMayBeginInPlace) {
  const auto make = [] {
    torch::manual_seed(3);
    nn::Sequential net(
        nn::Linear(6, 9), nn::ReLU(nn::ReLUOptions().inplace(true)),
        nn::Linear(9, 7), nn::Linear(7, 7),
        nn::ReLU(nn::ReLUOptions().inplace(true)), nn::Linear(7, 4));
    net->to(at::kDouble);
    return net;
  };
  auto alone = make();
  loss_of(alone->forward(inputs_of(0)), targets_of(0)).backward();
  for (const std::string schedule : {"1f1b", "zb_h1", "interleaved"}) {
    comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
      nn::Sequential net{nullptr};
      comm::in_turn(ranks.world(), [&] { net = make(); });
      const int64_t chunks = schedule == "interleaved" ? 2 : 1;
      // Behind a Linear, before what is in place.
      const std::vector<int64_t> lengths =
          chunks == 2 ? std::vector<int64_t>{1, 2, 1, 2}
                      : std::vector<int64_t>{1, 5};
      const auto parts = split(net, lengths);
      std::vector<PipelineStage> stages;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t run = chunk * 2 + ranks.rank();
        stages.emplace_back(parts[run], run, 2 * chunks);
      }
      Schedule pipe(
          std::move(stages), ranks.world(),
          {.schedule = schedule, .num_microbatches = 4, .loss = loss_of});
      pipe.step(inputs_of(0), targets_of(0));
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const auto& part = parts[chunk * 2 + ranks.rank()];
        for (const auto& each : part->named_parameters()) {
          EXPECT_TRUE(at::allclose(each.value().grad(),
                                   alone->named_parameters()[each.key()].grad(),
                                   1e-10, 1e-12))
              << schedule << " " << each.key();
        }
      }
    });
  }
}

// Stages that give several tensors: two that are added to, of different sizes,
// one of whole numbers that goes along, one that only the last stage uses.
struct ManyImpl : nn::Module {
  nn::Linear wide{6, 6}, narrow{2, 2};
  bool is_tuple;
  explicit ManyImpl(bool tuple) : is_tuple(tuple) {
    register_module("wide", wide);
    register_module("narrow", narrow);
    to(at::kDouble);
  }
  using Several = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
  Several forward(const at::Tensor& x, const at::Tensor& y,
                  const at::Tensor& rows, const at::Tensor& aside) {
    const auto a = at::tanh(wide->forward(x)) + y.sum(1, true);
    return {a, at::tanh(narrow->forward(y)).index_select(0, rows), rows, aside};
  }
};
TORCH_MODULE(Many);

struct FirstImpl : nn::Module {
  nn::Linear in{6, 6}, beside{6, 2};
  FirstImpl() {
    register_module("in", in);
    register_module("beside", beside);
    to(at::kDouble);
  }
  std::vector<at::Tensor> forward(const at::Tensor& x) {
    return {in->forward(x), beside->forward(x),
            at::arange(x.size(0) - 1, -1, -1), x * 0.1};
  }
};
TORCH_MODULE(First);

struct LastImpl : nn::Module {
  nn::Linear out{6, 4};
  LastImpl() {
    register_module("out", out);
    to(at::kDouble);
  }
  at::Tensor forward(const std::vector<at::Tensor>& all) {
    return out->forward(all.at(0) + all.at(3)) + all.at(1).sum(1, true);
  }
};
TORCH_MODULE(Last);

struct SeveralNet {
  First first;
  Many one{true}, two{true};
  Last last;
  std::map<std::string, at::Tensor> gradients() {
    std::map<std::string, at::Tensor> all;
    const auto add = [&](const std::string& name, nn::Module& module) {
      for (const auto& each : module.named_parameters()) {
        all[name + each.key()] = each.value().grad();
      }
    };
    add("0.", *first), add("1.", *one), add("2.", *two), add("3.", *last);
    return all;
  }
};
SeveralNet make_several() {
  torch::manual_seed(11);
  return {};
}

TEST(Pipeline, StagesGiveSeveralTensors) {
  auto alone = make_several();
  constexpr int64_t kMicro = 4;
  double loss = 0;
  for (int64_t m = 0; m < kMicro; ++m) {
    const auto part = [&](const at::Tensor& batch) {
      return batch.chunk(kMicro)[m];
    };
    const auto all = alone.first->forward(part(inputs_of(0)));
    const auto [a, b, c, d] =
        alone.one->forward(all[0], all[1], all[2], all[3]);
    const auto [e, f, g, h] = alone.two->forward(a, b, c, d);
    const auto each =
        loss_of(alone.last->forward({e, f, g, h}), part(targets_of(0))) /
        kMicro;
    each.backward();
    loss += each.item<double>();
  }
  const auto wanted = alone.gradients();
  for (const std::string schedule : {"gpipe", "1f1b", "zb_h1", "interleaved"}) {
    const int64_t ranks = schedule == "interleaved" ? 2 : 4;
    for (const bool shards : {false, true}) {
      SCOPED_TRACE(c10::str(schedule, shards ? ", sharded" : ""));
      comm::run_threads(ranks, "shm", [&](comm::Communicator& on) {
        std::optional<SeveralNet> net;
        comm::in_turn(on.world(), [&] { net = make_several(); });
        const mesh::DeviceMesh mesh({.pp = ranks}, ranks);
        std::vector<PipelineStage> stages;
        std::vector<std::shared_ptr<void>> kept;
        const auto add = [&](auto module, int64_t index) {
          if (index % ranks != on.rank()) return;
          if (!shards) return void(stages.emplace_back(module, index, 4));
          auto sharded = std::make_shared<FullySharded<decltype(module)>>(
              fully_shard(module, mesh, on, {.zero_stage = 0}));
          kept.push_back(sharded);
          stages.emplace_back(*sharded, index, 4);
        };
        add(net->first, 0), add(net->one, 1);
        add(net->two, 2), add(net->last, 3);
        Schedule pipe(std::move(stages), on.world(),
                      {.schedule = schedule,
                       .num_microbatches = kMicro,
                       .loss = loss_of});
        for (int step = 0; step < 2; ++step) {  // shapes are known then
          for (const auto& stage : pipe.stages()) stage.module().zero_grad();
          EXPECT_NEAR(pipe.step(inputs_of(0), targets_of(0)).loss, loss, 1e-12);
          for (const auto& stage : pipe.stages()) {
            for (const auto& each : stage.module().named_parameters()) {
              const auto name = c10::str(stage.index(), ".", each.key());
              EXPECT_TRUE(at::allclose(each.value().grad(), wanted.at(name),
                                       1e-10, 1e-12))
                  << name;
            }
          }
        }
        EXPECT_NEAR(pipe.eval(inputs_of(0), targets_of(0)).loss, loss, 1e-12);
      });
    }
  }
}

// Another shape for its third micro-batch.
struct ChangingImpl : nn::Module {
  int calls = 0;
  at::Tensor forward(const at::Tensor& x) {
    return ++calls == 3 ? at::cat({x, x}, 1) : x + 0;
  }
};
TORCH_MODULE(Changing);

// All ranks hear of a batch that is refused on one, and the next is trained.
TEST(Pipeline, GoesOnBehindABatchThatIsRefused) {
  comm::run_threads(2, "shm", [&](comm::Communicator& ranks) {
    Pipe pipe(net_in_turn(ranks), ranks.world(),
              {.num_microbatches = 2, .loss = loss_of});
    const at::Tensor x = numbers(8, 6, 0.3), y = numbers(8, 4, 0.2);
    const double loss = pipe.eval(x, y).loss;
    for (const int64_t rows : {5, 4}) {
      try {
        pipe.step(x, y.narrow(0, 0, rows));
        ADD_FAILURE() << "targets of " << rows << " rows were taken";
      } catch (const Error& error) {
        EXPECT_THAT(message_of(error),
                    HasSubstr(rows == 5 ? "targets are [5, 4]"
                                        : "targets are of 4 samples and inputs "
                                          "of 8"));
      }
      EXPECT_EQ(pipe.eval(x, y).loss, loss);
    }
  });
}

TEST(Pipeline, RefusesWhatDoesNotGoTogether) {
  const auto error_with = [](int64_t ranks, const ScheduleOptions& options,
                             int64_t chunks = 1, int64_t rows = kRows) {
    return testing::failure_of_ranks(
        ranks, [&](comm::Communicator& communicator) {
          Pipe pipe(net_in_turn(communicator), communicator.world(), options,
                    chunks);
          pipe.step(numbers(rows, 6, 0.3), numbers(rows, 4, 0.2));
        });
  };
  EXPECT_THAT(error_with(2, {.schedule = "1f2b", .loss = loss_of}),
              HasSubstr("there is no schedule 1f2b. There are: naive, gpipe"));
  EXPECT_THAT(error_with(2, {.schedule = "dualpipe", .loss = loss_of}, 2),
              HasSubstr("Use dualpipe_v"));
  EXPECT_THAT(error_with(2, {.schedule = "1f1b", .loss = loss_of}, 2),
              HasSubstr("1f1b has one stage a rank"));
  EXPECT_THAT(
      error_with(
          2,
          {.schedule = "interleaved", .num_microbatches = 3, .loss = loss_of},
          2),
      HasSubstr("num_microbatches is 3. Nearest: 2 or 4"));
  EXPECT_THAT(error_with(2, {.num_microbatches = 5, .loss = loss_of}),
              HasSubstr("5 micro-batches do not share out evenly. Nearest: "
                        "20 or 25"));
  EXPECT_THAT(error_with(2, {.num_microbatches = 2}),
              HasSubstr("step() needs ScheduleOptions::loss"));
  EXPECT_THAT(
      testing::failure_of_ranks(
          2,
          [](comm::Communicator& ranks) {
            Pipe pipe(net_in_turn(ranks), ranks.world(),
                      {.num_microbatches = 2 + ranks.rank(), .loss = loss_of});
          }),
      HasSubstr("this rank has 1f1b with 3 micro-batches and 1 stages "
                "a rank, and the first one 1f1b with 2"));
  EXPECT_THAT(error_with(4, {.loss = loss_of}, 4),
              HasSubstr("16 parts of 10 children"));
  EXPECT_THAT(testing::failure_of_ranks(2,
                                        [](comm::Communicator& ranks) {
                                          const PipelineStage stage(
                                              nn::Linear(2, 2), 0, 2);
                                          Schedule({stage}, ranks.world(), {});
                                        }),
              HasSubstr("was given stage 0 as chunk 0; the schedule has stage "
                        "1 there"));
  EXPECT_THAT(
      testing::failure_of_ranks(
          2,
          [](comm::Communicator& ranks) {
            const PipelineStage stage(Changing(), ranks.rank(), 2);
            Schedule schedule({stage}, ranks.world(),
                              {.num_microbatches = 4, .loss = loss_of});
            schedule.eval(at::ones({8, 2}));
          }),
      HasSubstr("stage 0 gave [2, 4] of Float for a micro-batch and announced "
                "[2, 2] of Float"));
  EXPECT_THAT(testing::failure_of_ranks(
                  2,
                  [](comm::Communicator& ranks) {
                    const PipelineStage stage =
                        ranks.rank() == 0
                            ? PipelineStage(First(), 0, 2)
                            : PipelineStage(
                                  nn::LayerNorm(nn::LayerNormOptions({6})), 1,
                                  2);
                    Schedule schedule({stage}, ranks.world(), {});
                    schedule.eval(numbers(4, 6, 0.3));
                  }),
              HasSubstr("is given 4 tensors, which its forward() does not "
                        "take"));
  nn::Linear tied(3, 3);
  EXPECT_THROW(split(nn::Sequential(tied, nn::Tanh(), tied), {2, 1}), Error);
}

}  // namespace
}  // namespace tessera
