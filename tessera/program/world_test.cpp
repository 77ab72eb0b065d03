#include "tessera/program/world.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/programs.h"

namespace tessera::program {
namespace {

// pp stages x dp x tp ranks, tp innermost: ZeRO-3 over dp, two collectives in
// each unit over tp, the norm over the world, and, on the last stage and the
// first, the sum of a tied embedding.
class Cluster {
 public:
  enum Lane { kPipeline, kData, kTensor, kWorld, kTied, kLanes };

  Cluster(int64_t pp, int64_t dp, int64_t tp, int64_t units_each = 2,
          int64_t microbatches = 4)
      : pp_(pp), dp_(dp), tp_(tp) {
    for (int64_t stage = 0; stage < pp; ++stage) {
      stages_.push_back(program_of(stage, units_each, microbatches));
    }
    for (int64_t rank = 0; rank < pp * dp * tp; ++rank) {
      world.programs.push_back(stages_[rank / (dp * tp)].get());
    }
    world.lanes = {"pp", "dp", "tp", "world", "tied"};
    world.pipeline = kPipeline;
    world.members = [this](int64_t rank, int64_t lane) {
      return members(rank, lane);
    };
  }

  // A program that this rank alone runs.
  RankProgram& alone(int64_t rank) {
    own_.push_back(std::make_unique<RankProgram>(*world.programs[rank]));
    world.programs[rank] = own_.back().get();
    return *own_.back();
  }

  World world;

 private:
  std::unique_ptr<RankProgram> program_of(int64_t stage, int64_t each,
                                          int64_t microbatches) const {
    Units units;
    auto of = std::make_unique<RankProgram>();
    for (int64_t unit = 0; unit < each * pp_; ++unit) {
      units.all.push_back({.reads = {unit}, .zero_stage = 3});
      of->units.push_back(
          {.gather = {{"all_gather", kData, at::kFloat, 64}},
           .reduce = {{"reduce_scatter", kData, at::kFloat, 128}},
           .forward = {{"all_gather", kTensor, at::kFloat, 32},
                       {"reduce_scatter", kTensor, at::kFloat, 64}},
           .backward = {{"all_gather", kTensor, at::kFloat, 32},
                        {"reduce_scatter", kTensor, at::kFloat, 64}}});
    }
    const int64_t tied = stage == 0 ? 0 : each * pp_ - 1;
    if (stage == 0 || stage == pp_ - 1) {
      units.all[tied].summed = true;
      of->units[tied].sum = {{"all_reduce", kTied, at::kFloat, 64}};
    }
    units.chunks.emplace_back(each);
    std::iota(units.chunks[0].begin(), units.chunks[0].end(), stage * each);
    of->program = passes::lower(
        schedules::step(schedules::named("1f1b"),
                        {.stages = pp_, .num_microbatches = microbatches},
                        stage),
        units);
    of->loss = {{"all_reduce", kTensor, at::kFloat, 16}};
    of->norm = {{"all_reduce", kWorld, at::kDouble, 1}};
    of->stage = stage;
    of->stages = pp_;
    of->message_elements = 1024;
    return of;
  }

  std::vector<int64_t> members(int64_t rank, int64_t lane) const {
    const int64_t stage = rank / (dp_ * tp_), data = rank / tp_ % dp_,
                  tensor = rank % tp_;
    std::vector<int64_t> ranks;
    const auto add = [&](int64_t s, int64_t d, int64_t t) {
      ranks.push_back((s * dp_ + d) * tp_ + t);
    };
    const bool is_end = stage == 0 || stage == pp_ - 1;
    switch (lane) {
      case kPipeline:
        for (int64_t s = 0; s < pp_; ++s) add(s, data, tensor);
        break;
      case kData:
        for (int64_t d = 0; d < dp_; ++d) add(stage, d, tensor);
        break;
      case kTensor:
        for (int64_t t = 0; t < tp_; ++t) add(stage, data, t);
        break;
      case kWorld:
        for (int64_t r = 0; r < pp_ * dp_ * tp_; ++r) ranks.push_back(r);
        break;
      default:
        add(is_end ? 0 : stage, data, tensor);
        if (is_end && pp_ > 1) add(pp_ - 1, data, tensor);
    }
    return ranks;
  }

  int64_t pp_, dp_, tp_;
  std::vector<std::unique_ptr<RankProgram>> stages_, own_;
};

TEST(World, EqualRanksAreFollowedAsOne) {
  Cluster cluster(4, 4, 2);
  const WorldProof proof = check(cluster.world);
  EXPECT_EQ(proof.classes, 4);
  EXPECT_GT(proof.messages, 0);
  cluster.alone(13);  // the same program, but its own
  EXPECT_GT(check(cluster.world).classes, 4);
}

// The faults that somebody could make in one rank's program, or in what its
// units move: each is found, and says where.
struct Fault {
  const char* name;
  std::function<void(RankProgram&)> make;
  std::vector<const char*> says;
};

size_t place_of(const Program& program, const Instruction& what) {
  const auto found = std::ranges::find(program, what);
  TORCH_INTERNAL_ASSERT(found != program.end(), describe(what));
  return static_cast<size_t>(found - program.begin());
}
void drop(Program& program, const Instruction& what) {
  program.erase(program.begin() +
                static_cast<int64_t>(place_of(program, what)));
}
void swap(Program& program, const Instruction& a, const Instruction& b) {
  std::swap(program[place_of(program, a)], program[place_of(program, b)]);
}

// Of rank 9 of 4 x 4 x 2: stage 1, with units 2 and 3.
const std::vector<Fault>& faults() {
  using I = Instruction;
  static const I gather{Op::kGatherParameters, -1, 2};
  static const I reduce{Op::kReduceGradients, 1, 3};
  static const std::vector<Fault> list = {
      {"a gather dropped",
       [](RankProgram& of) {
         drop(of.program, begin(gather));
         drop(of.program, await(gather));
       },
       {"group dp", "rank", "collective"}},
      {"a reduction dropped",
       [](RankProgram& of) {
         drop(of.program, begin(reduce));
         drop(of.program, await(reduce));
       },
       {"group dp", "begins"}},
      {"two collectives swapped",
       [](RankProgram& of) {
         swap(of.program, begin(gather), begin({Op::kGatherParameters, -1, 3}));
         std::swap(of.units[2].gather[0].elements,
                   of.units[3].gather[0].elements);
         of.units[3].gather[0].elements = 96;
       },
       {"group dp", "96"}},
      {"a gather on the wrong axis",
       [](RankProgram& of) { of.units[2].gather[0].lane = Cluster::kTensor; },
       {"group"}},
      {"a reduction over the world",
       [](RankProgram& of) { of.units[3].reduce[0].lane = Cluster::kWorld; },
       {"group"}},
      {"a size off",
       [](RankProgram& of) { of.units[2].gather[0].elements += 1; },
       {"group dp", "65", "GatherParameters"}},
      {"another type",
       [](RankProgram& of) { of.units[3].reduce[0].dtype = at::kBFloat16; },
       {"group dp", "BFloat16", "ReduceGradients"}},
      {"another verb",
       [](RankProgram& of) { of.units[3].reduce[0].verb = "all_reduce"; },
       {"group dp", "all_reduce"}},
      {"a collective inside a unit dropped",
       [](RankProgram& of) { of.units[2].forward.pop_back(); },
       {"group tp", "Forward"}},
      {"collectives inside a unit swapped",
       [](RankProgram& of) {
         std::swap(of.units[2].backward[0], of.units[2].backward[1]);
       },
       {"group tp", "Backward"}},
      {"the norm not summed",
       [](RankProgram& of) {
         drop(of.program, begin({Op::kSumNorm}));
         drop(of.program, await({Op::kSumNorm}));
       },
       {"group world", "begins no further one"}},
      {"a message not sent",
       [](RankProgram& of) {
         drop(of.program, begin({Op::kSendActivations, 2}));
         drop(of.program, await({Op::kSendActivations, 2}));
       },
       {"waits for ever", "rank"}},
      {"two messages swapped",
       [](RankProgram& of) {
         for (auto phase : {begin, await}) {
           swap(of.program, phase({Op::kSendGradients, 1}),
                phase({Op::kSendGradients, 2}));
         }
       },
       {"rank"}},
      {"a message to itself never awaited in time",
       [](RankProgram& of) {
         // Each end waits for the other's receive.
         Program& program = of.program;
         const size_t at = place_of(program, await({Op::kReceiveGradients, 0}));
         std::rotate(program.begin() + 1,
                     program.begin() + static_cast<int64_t>(at),
                     program.begin() + static_cast<int64_t>(at) + 1);
         drop(program, begin({Op::kReceiveGradients, 0}));
         program.insert(program.begin() + 1, begin({Op::kReceiveGradients, 0}));
       },
       {"waits for ever"}},
      {"messages of another size",
       [](RankProgram& of) { of.message_elements = 512; },
       {"messages of rank", "512"}},
  };
  return list;
}

TEST(World, SeededFaultsAreNamed) {
  EXPECT_EQ(faults().size(), 15U);
  for (const Fault& fault : faults()) {
    Cluster cluster(4, 4, 2);
    fault.make(cluster.alone(9));
    try {
      check(cluster.world);
      ADD_FAILURE() << fault.name << " was not found";
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      for (const char* word : fault.says) {
        EXPECT_NE(text.find(word), std::string::npos)
            << fault.name << ": " << text;
      }
    }
  }
}

// Of a gather that an instruction is, the whole; of one inside of a unit that
// is what its facts count already.
TEST(World, WhatARankMovesIsWhatGroupsCount) {
  const Cluster cluster(2, 4, 2);
  const auto moved = [&](int64_t rank, const Instruction& each) {
    return moved_bytes(cluster.world, rank, {each},
                       /*message_element_bytes=*/2);
  };
  EXPECT_EQ(moved(0, begin({Op::kGatherParameters, -1, 0})), 4 * 4 * 64);
  EXPECT_EQ(moved(0, await({Op::kGatherParameters, -1, 0})), 0);
  EXPECT_EQ(moved(0, begin({Op::kReduceGradients, 0, 0})), 4 * 128);
  EXPECT_EQ(moved(0, {Op::kForward, 0, 0}), 4 * (32 + 64));
  EXPECT_EQ(moved(0, begin({Op::kSendActivations, 0})), 2 * 1024);
  EXPECT_EQ(moved(8, begin({Op::kReceiveActivations, 0})), 0);
}

// 8 tp x 8 pp x 64 dp, sixteen units a stage and sixteen micro-batches.
TEST(World, FourThousandRanks) {
  Cluster cluster(8, 64, 8, /*units_each=*/16, /*microbatches=*/16);
  const WorldProof proof = check(cluster.world);
  EXPECT_EQ(proof.classes, 8);
  EXPECT_GT(proof.collectives, 10000);
}

}  // namespace
}  // namespace tessera::program
