// A model that a command was pointed at: decoder, tokenizer, special tokens.
#pragma once

#include <string>

#include "tessera/data/tokenizer.h"
#include "tessera/train/trained_model.h"

namespace tessera::cli {

// `path`: a checkpoint, a run folder or a Hugging Face folder. `dtype`: "fp32",
// "bf16" or "fp64". The weights on one rank, on the CPU.
train::TrainedModel load_model(const std::string& path,
                               const std::string& dtype);

// `path`: a tokenizer.json or a folder with one; "": the model's own.
// TS_CHECK_CONFIG on one whose ids the model does not have.
data::Tokenizer load_tokenizer(const std::string& path,
                               const train::TrainedModel& model);

}  // namespace tessera::cli
