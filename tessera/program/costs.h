// What instructions cost: a simulator's view of devices and of what links them.
//
// Units: of time, any one: a stage's forward, seconds.
// Work:  of an instruction on a rank, all that the rank does in it by itself:
//        without the collectives inside; of communication, to begin it. Of what
//        lies in files, the time in which it is read or written.
// Links: of each kind of group (World::lanes) one: a ring's steps over it, or a
//        tree's.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "tessera/program/facts.h"
#include "tessera/program/instruction.h"
#include "tessera/program/units.h"
#include "tessera/program/world.h"

namespace tessera::program {

struct Link {
  double latency = 0;  // of a message, which occupies nobody
  double bytes_per_time = std::numeric_limits<double>::infinity();
};

// Equal ranks (World::programs) have equal work: a rank is asked for them all.
using Work =
    std::function<double(int64_t rank, const Instruction& instruction)>;

struct Costs {
  Work work;
  std::vector<Link> links = {};  // by lane; where there is none, it is free
  int64_t message_element_bytes = 4;
};

// Of a collective over a ring of `ranks`, from when all have begun it; an
// all_reduce goes up and down a tree where that is faster, as of few bytes. A
// recv takes no time: its send does.
// `bytes`: of the whole tensor, before it is scattered or behind the gather.
double time_of(const std::string& verb, int64_t ranks, double bytes,
               const Link& link);

// Of a micro-batch; a whole backward is both parts.
struct Times {
  double forward = 1, input = 1, weight = 1;
};
double time_of(Op op, const Times& times);

// A table: by rank along pp, of a micro-batch on its whole way through the
// rank, which is through `passes` of its chunks (Pipeline::num_runs() /
// stages): they share it alike, as a chunk's units do.
// `units`: by rank along pp, as the programs were made with; none: of whole
// chunks.
Work work_of_stages(std::vector<Times> stages, std::vector<Units> units,
                    int64_t passes, std::function<int64_t(int64_t)> stage_of);

// What a device does in a unit of time, at most: an instruction takes as long
// as its operations or its bytes, whichever is longer.
struct Device {
  double flops = 1;
  double memory_bytes = std::numeric_limits<double>::infinity();
  double file_bytes = std::numeric_limits<double>::infinity();
};
// What a rank computes with: its facts, and how its program recomputes.
struct RankFacts {
  Facts facts;
  Units units;
};
// `of`: of a rank; asked for once for each instruction.
Work work_of_device(const Device& device,
                    std::function<const RankFacts&(int64_t rank)> of);

// How long instructions took, by the rank that ran them: of equal ones (of the
// same unit and chunk, whichever the micro-batch) the mean. What was not
// measured costs nothing.
using Measured = std::map<int64_t, std::vector<std::pair<Instruction, double>>>;
Work work_of_measured(const Measured& measured);

}  // namespace tessera::program
