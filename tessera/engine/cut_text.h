// How a model and its micro-batches are shared out, in words.
//
// REQUIRES, of all: a completed configuration.
#pragma once

#include <string>
#include <vector>

#include "tessera/engine/run_config.h"

namespace tessera::engine {

// "layers 5, 3 by facts": of each part of the model.
std::string split_text(const RunConfig& config);
// Where that is from: "evenly", "by facts and mesh.speeds".
std::string cut_text(const RunConfig& config);
// "stages      layers 5, 3 by facts" and, below, what was seen, each in a line
// of a plan; empty where there is neither.
std::string stages_lines(const RunConfig& config);
// "embedding 1.2ms, a layer 3.4ms, head 9.8ms of a micro-batch; speeds 1, 0.5":
// what the run that pipeline.cut names has shown. Empty: none was asked.
std::string seen_text(const RunConfig& config);
// "3, 1": of a micro-batch, by data-parallel rank; "2" where all have as many.
std::string rows_text(const RunConfig& config);
// The same as a sentence, with the reason; "" where all have as many.
std::string shares_text(const RunConfig& config);

// Speeds and cuts that were asked for and change nothing, each with the reason.
std::vector<std::string> idle_cuts(const RunConfig& config);

}  // namespace tessera::engine
