#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "tessera/program/checker.h"
#include "tessera/program/executor.h"
#include "tessera/program/schedules/accumulation.h"

namespace tessera::program {
namespace {

TEST(Accumulation, OneMicrobatchAliveAndTheLastOneReduces) {
  for (int64_t k = 1; k <= 16; ++k) {
    const Program program = schedules::accumulation(k, /*clip=*/true);
    EXPECT_EQ(static_cast<int64_t>(program.size()), 4 * k + 4);
    const Proof proof = check(program);
    EXPECT_EQ(proof.num_microbatches, k);
    EXPECT_EQ(proof.peak_alive, 1);
  }
  EXPECT_EQ(describe(schedules::accumulation(2, /*clip=*/false)),
            "ZeroGradients\nLoadInputs 0\nForward 0\nLoadTargets 0\n"
            "Backward 0\nLoadInputs 1\nForward 1\nLoadTargets 1\n"
            "BackwardReduce 1\nReduceGradients\nOptimizerStep\n");
}

// Every instruction matters: a program that lacks one, or has one twice, is
// refused (only clipping may be absent).
TEST(Checker, RefusesAProgramWithAnInstructionMissingOrDoubled) {
  const Program sound = schedules::accumulation(2, /*clip=*/true);
  for (size_t i = 0; i < sound.size(); ++i) {
    Program missing = sound;
    missing.erase(missing.begin() + static_cast<int64_t>(i));
    if (sound[i].op == Op::kClipNorm) {
      EXPECT_NO_THROW(check(missing));
    } else {
      EXPECT_THROW(check(missing), c10::Error) << describe(sound[i]);
    }
    Program doubled = sound;
    doubled.insert(doubled.begin() + static_cast<int64_t>(i), sound[i]);
    EXPECT_THROW(check(doubled), c10::Error) << describe(sound[i]);
  }
}

TEST(Checker, RefusesNeighboursInTheWrongOrder) {
  const Program sound = schedules::accumulation(1, /*clip=*/true);
  for (size_t i = 0; i + 1 < sound.size(); ++i) {
    Program swapped = sound;
    std::swap(swapped[i], swapped[i + 1]);
    // Targets may be loaded before or after the forward.
    if (sound[i].op == Op::kForward && sound[i + 1].op == Op::kLoadTargets) {
      EXPECT_NO_THROW(check(swapped));
    } else {
      EXPECT_THROW(check(swapped), c10::Error) << describe(sound[i]);
    }
  }
}

class RecordingStage : public Stage {
 public:
  std::string calls;
  void zero_gradients() override { calls += "Z "; }
  void load_inputs(int64_t m) override { add("Li", m); }
  void load_targets(int64_t m) override { add("Lt", m); }
  void forward(int64_t m) override { add("F", m); }
  void backward(int64_t m, bool reduce) override { add(reduce ? "R" : "B", m); }
  void reduce_gradients() override { calls += "W "; }
  void clip_norm() override { calls += "C "; }
  void optimizer_step() override { calls += "O"; }

 private:
  void add(const std::string& name, int64_t m) {
    calls += name + std::to_string(m) + " ";
  }
};

TEST(Executor, CallsWhatTheProgramSays) {
  RecordingStage stage;
  size_t observed = 0;
  const Program program = schedules::accumulation(2, /*clip=*/true);
  execute(program, stage, [&](const Instruction& instruction, double seconds) {
    EXPECT_EQ(instruction, program[observed++]);
    EXPECT_GE(seconds, 0);
  });
  EXPECT_EQ(stage.calls, "Z Li0 F0 Lt0 B0 Li1 F1 Lt1 R1 W C O");
  EXPECT_EQ(observed, program.size());
}

}  // namespace
}  // namespace tessera::program
