// A training step is a program: the list of everything that a rank does in it.
//
// A schedule is a pure function that makes the list, passes spell it out
// (passes/), the checker proves it sound, the executor runs it. Instructions
// name micro-batches and units, never tensors; what a unit computes and moves
// is a fact of the unit (facts.h).
//
// Communication has two instructions, begin and await: what lies between them
// goes on meanwhile. A schedule writes it whole; a pass takes it apart.
// Lanes: a group of ranks is a lane of its own, on which collectives run in the
//        order in which they were begun; messages are matched one by one; all
//        else is done by the rank itself, one after the other.
// Source: the idea of a schedule as data, Huang et al. 2019 (GPipe) and
//         Narayanan et al. 2019 (PipeDream), as written in many training
//         systems.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/program/placement.h"

namespace tessera::program {

enum class Op {
  kReplicateParameters,  // to the other devices of this process
  kZeroGradients,
  kShareBatch,   // of the next step, from the rank of a group that reads it to
                 // the others: begin, await
  kLoadInputs,   // of a micro-batch
  kLoadTargets,  // of a micro-batch
  kLoadDocuments,  // where those of a micro-batch begin, and the tokens ahead
                   // of its own, for a chunk without its inputs
  kForward,        // of a micro-batch through a unit
  kRecompute,      // the same again, for a backward that needs it
  kReplay,         // the same again, for the input of the unit behind it alone
  kLoss,  // of a micro-batch, by the last unit's head from its output, which
          // becomes its gradient; adds to the head's gradients
  kBackward,          // of a micro-batch through a unit: both parts at once
  kBackwardInput,     // the gradient of the unit's input
  kBackwardWeight,    // the gradients of its parameters
  kGatherParameters,  // of a unit, from the ranks that shard them: begin, await
  kFreeParameters,    // of a unit: its own shard stays
  kAllocateGradients,  // of a unit whose gradients live as shards: whole
  kReduceGradients,  // of a unit, over the ranks that share them: begin, await
  kSumGradients,     // of shards, over the replicas beside: begin, await
  kReduceReplicas,   // gradients of the other devices of this process
  // Messages of a micro-batch between stages: begin, await.
  kSendActivations,
  kReceiveActivations,
  kSendGradients,
  kReceiveGradients,
  // The same where the next stage, or the one before, lies on this rank: of
  // the chunk that has them.
  kHandActivations,
  kHandGradients,
  kNorm,           // this rank's part of the squared gradient norm
  kSumNorm,        // over the world: begin, await
  kClipGradients,  // by the norm
  kGatherUpdates,  // of a unit whose matrices are updated whole: begin, await
  // Of a unit, where there are two versions: the update will change a copy, in
  // place of the version that this step was taken at.
  kKeepParameters,
  kOptimizerStep,  // of a unit
  kNextVersion,    // the next batch's is this step's from here on
  // What lies in files, of a unit: begin, await; and back. A helper does them
  // in their order: a fetch behind a release is read when that is done.
  kFetchStates,  // of the optimizer
  kReleaseStates,
  kFetchParameters,  // this rank's own
  kReleaseParameters,
};

enum class Phase { kWhole, kBegin, kAwait };

struct Instruction {
  Op op;
  int64_t microbatch = -1;  // -1: of the whole step
  int64_t unit = -1;        // -1: of the whole chunk, or of all; see units.h
  int64_t chunk = 0;  // of those that a rank holds; see schedules/schedule.h
  Phase phase = Phase::kWhole;
  // Of the parameters, and so of the batch that is taken at it: 0 is that of
  // this step, 1 of the next one, where a schedule has two.
  int64_t version = 0;
  bool operator==(const Instruction&) const = default;
};

bool is_message(Op op);
bool is_send(Op op);
bool is_hand_over(Op op);
// Messages, and what a group of ranks does together.
bool is_communication(Op op);
// Runs a unit: forward, recompute, replay, backward and its parts.
bool is_compute(Op op);
// Recompute and replay.
bool is_again(Op op);
// A backward through a unit, or its part, that adds to the gradients of
// parameters. So does a loss that is trained on, right before its backward.
bool adds_gradients(Op op);
// The weights' part of a backward multiplies what the input part left to it.
bool reads_parameters(Op op);
// From files.
bool is_fetch(Op op);
bool is_release(Op op);
// REQUIRES: is_fetch(fetch); is_release(release).
Op release_of(Op fetch);
Op fetch_of(Op release);
// Some instruction adds_gradients().
bool trains(const std::vector<Instruction>& program);

Instruction begin(Instruction whole);
Instruction await(Instruction whole);

// Whom a message of a stage concerns: activations go up, gradients down.
struct Ends {
  bool sends = false;
  bool activations = false;
  int64_t sender = 0, receiver = 0;  // virtual stages
  int64_t peer_stage = 0;            // the rank along pp at the other end
};
// REQUIRES: is_message(message.op).
Ends ends_of(const Instruction& message, int64_t stage, int64_t stages,
             Placement placement = Placement::kRoundRobin);

using Program = std::vector<Instruction>;

// Steps that go on without a flush are lowered and proven as one program, whose
// versions and micro-batches are counted on; this cuts it behind each
// kNextVersion into what one step runs, whose own batch has version 0 and
// micro-batches 0 .. m - 1. Without kNextVersion: the program itself.
std::vector<Program> steps_of(const Program& program, int64_t num_microbatches);

// What a program is for: a step, or forwards and losses alone.
enum class Purpose { kTraining, kEvaluation };

const char* name_of(Op op);
// "Forward 3", "Forward 3 unit 1", "begin GatherParameters unit 1".
std::string describe(const Instruction& instruction);
// One line an instruction.
std::string describe(const Program& program);

}  // namespace tessera::program
