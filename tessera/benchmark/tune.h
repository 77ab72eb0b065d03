// From figures to the table that comm.algorithm=auto reads: which algorithm was
// the fastest, by verb, backend, ranks and bytes.
//
// Between two sizes that were measured the border is their geometric mean; the
// first range begins at 0 and the last has no end. An algorithm takes the place
// of the backend's own where it was faster by more than noise (5%) and all its
// elements were right; ranges that stay with the backend have no entry.
// all_to_all has a choice between hosts alone, of two forms; its entries, of
// hosts for ranks and of what a host has for a rank for bytes, have the faster.
#pragma once

#include <string>
#include <vector>

#include "tessera/benchmark/measure.h"
#include "tessera/comm/algorithms/tuning_table.h"

namespace tessera::benchmark {

// What there is a choice of algorithms for, wherever the ranks are.
const std::vector<Operation>& tunable_operations();
// Of these: "auto", and every algorithm that a table may name.
std::vector<std::string> tunable_algorithms();
// Of all_to_all.
const std::vector<std::string>& forms_of_all_to_all();

// `hosts`: that the ranks were on, as many on each.
// REQUIRES: one dtype, at most one reduction, ascending sizes of each
// operation, and of each backend a cell of its own algorithm, "auto"; of
// all_to_all one of each form instead, and hosts > 1.
comm::algorithms::TuningTable tuning_table(const std::vector<Row>& rows,
                                           const std::string& machine,
                                           int64_t hosts = 1);

}  // namespace tessera::benchmark
