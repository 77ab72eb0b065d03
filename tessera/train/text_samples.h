// Texts that the model writes while it trains (monitor.sample): the same on all
// replicas, by the program of a validation, so that any mesh will do.
//
// Bits:    a text is a pure function of weights, run.seed and step; training
//          goes on with the bits that it has without.
// Comm:    engine/generate.h's, by evaluations.
// Errors:  TS_CHECK_CONFIG, before ranks start by check_samples(): nothing that
//          tells what tokens mean, a prompt that is too long; by the
//          constructor: data with tokens that the tokenizer does not have.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/data/tokenizer.h"
#include "tessera/engine/rank_model.h"
#include "tessera/monitor/step_record.h"
#include "tessera/train/data_setup.h"

namespace tessera::train {

// `tokenizer_path`: what prepare_data() gave back.
void check_samples(const engine::RunConfig& config,
                   const std::string& tokenizer_path);

class TextSamples {
 public:
  // Collective. REQUIRES: monitor.sample > 0, and what outlives it.
  TextSamples(const engine::RunConfig& config, const Datasets& data,
              comm::Group& world);

  // Collective over the world; the texts are rank 0's.
  monitor::Sample write(engine::RankModel& model, comm::Communicator& ranks,
                        int64_t step) const;

 private:
  const engine::RunConfig& config_;
  std::optional<data::Tokenizer> tokenizer_;  // on rank 0
  std::vector<int64_t> prompt_;
  std::vector<int64_t> stops_;
  int64_t num_tokens_ = 0;  // ids from here on mean nothing
};

}  // namespace tessera::train
