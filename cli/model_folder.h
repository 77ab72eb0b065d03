// A model that a command was pointed at: where it is, its tokenizer, and the
// mesh that it is to run on.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/ranks.h"
#include "tessera/data/tokenizer.h"
#include "tessera/train/trained_model.h"

namespace tessera::cli {

// "fp32", "bf16", "fp16" or "fp64"; TS_CHECK_USAGE on another word.
at::ScalarType dtype_of(const std::string& word);

// `path`: a checkpoint, a run folder or a Hugging Face folder. `averaged`: with
// the averages of its weights.
train::ModelSource find_model(const std::string& path, const std::string& dtype,
                              bool averaged = false);

// `path`: a tokenizer.json or a folder with one; "": the model's own.
// TS_CHECK_CONFIG on one whose ids the model does not have.
data::Tokenizer load_tokenizer(const std::string& path,
                               const train::ModelSource& model);

// The configuration of a command that runs this model on a mesh.
// `extras`: flags --section.key=value, of which `keys` have an effect;
// TS_CHECK_CONFIG on any other key.
engine::RunConfig mesh_config(const train::ModelSource& model,
                              const std::string& dtype,
                              const std::vector<std::string>& extras,
                              const std::vector<std::string>& keys);

// The keys that say where a model is, on what devices, and how ranks talk, with
// these of the strategies' sections.
std::vector<std::string> keys_of_placement(
    const std::vector<std::string>& of_strategies);

// Opens this rank's part of the model, for `use`. What the device has no memory
// for is TS_CHECK_CONFIG, with what this rank holds.
void with_model(const train::ModelSource& source,
                const engine::RunConfig& config, comm::Communicator& ranks,
                const std::function<void(engine::RankModel&)>& use);

// The ranks that take part.
int64_t world_of(const engine::RunConfig& config, const RankFlags& flags,
                 const launch::RankEnvironment& place);

}  // namespace tessera::cli
