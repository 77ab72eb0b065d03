// Who reads the data, by data.reader.
//
// A group is the ranks that work on the same samples: those that differ along
// pp, cp and tp alone. With `every` each of them reads what it needs; with
// `first` the first one reads, for all of them. Rank 0 always reads.
//
// Comm: none of its own: arithmetic on ranks, and the group that it makes.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/engine/run_config.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::engine {

// The axes of a group.
std::vector<mesh::Axis> axes_of_readers();

// Whether one rank reads for others. REQUIRES, here and below: a completed
// configuration.
bool reads_for_others(const RunConfig& config);

// The rank that reads what `rank` trains on; itself with `every`.
int64_t reader_of(const RunConfig& config, int64_t rank);

// The group of this rank; its first rank reads. All ranks call it.
comm::Group& group_of_reader(const mesh::DeviceMesh& mesh,
                             comm::Communicator& ranks);

}  // namespace tessera::engine
