// Proves that the programs of all ranks go together.
//
// Rules: in every group all ranks begin the same collectives in the same order,
//        with the same sizes and types (but for the shares of an all_to_all,
//        which are each rank's own); every message meets its other end, in
//        order, with the same size; and all programs come to their end where
//        nothing is done before everybody that takes part has begun it (a
//        rendezvous), the collectives of a group one after the other.
// Cost:  ranks that run the same program, and whose groups look the same from
//        where they are, are followed as one: the work does not grow with the
//        world, but for sorting the ranks into such classes.
// Errors: TORCH_INTERNAL_ASSERT names the rank, the instruction, the group and
//        what the other rank does there.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/program/instruction.h"

namespace tessera::program {

// A collective: on which lane, of how many elements.
struct Transfer {
  std::string verb;  // "all_reduce", as comm::Group names it
  int64_t lane = 0;
  at::ScalarType dtype = at::kFloat;
  int64_t elements = 0;
};

// What the instructions of a unit do together with others, in order.
struct UnitTransfers {
  std::vector<Transfer> gather, reduce, sum, updates;
  // Inside of its forward and of its backward, or of its input part.
  std::vector<Transfer> forward, backward;
  std::vector<Transfer> again = {};  // of what is computed again
};

struct RankProgram {
  Program program;
  std::vector<UnitTransfers> units;  // by unit; may be shorter than needed
  // Of kLoss, kSumNorm; and of what ranks do together between two steps, where
  // a rank waits for all others (kNextVersion).
  std::vector<Transfer> loss, norm, between_steps = {};
  std::vector<Transfer> batch = {};  // of kShareBatch
  int64_t stage = 0, stages = 1;     // of the pipeline
  Placement placement = Placement::kRoundRobin;
  int64_t message_elements = 0;  // of each
};

struct World {
  std::vector<const RankProgram*> programs;  // by rank; equal ranks share one
  std::vector<std::string> lanes;            // names of the kinds of groups
  int64_t pipeline = -1;  // the lane along which stages lie, ascending
  // The ranks, ascending, of the group of this kind that `rank` is in: the same
  // for each of them.
  std::function<std::vector<int64_t>(int64_t rank, int64_t lane)> members;
};

struct WorldProof {
  int64_t classes = 0;      // of ranks that were followed as one
  int64_t collectives = 0;  // begun by one rank of each class, together
  int64_t messages = 0;
};

WorldProof check(const World& world);

// What a rank sends in a step, `program`, of its own: in collectives (see
// core/sent_bytes.h), and as messages.
int64_t moved_bytes(const World& world, int64_t rank, const Program& program,
                    int64_t message_element_bytes);

}  // namespace tessera::program
