// A model that training left behind: found, then read a parameter at a time, or
// opened on a mesh, where every rank reads its own part alone.
//
// Takes:  a checkpoint folder (step-N), a run folder (its newest checkpoint),
//         or a Hugging Face folder.
// Comm:   open_for_evaluation() is collective over the world.
// Errors: TS_CHECK_IO where the folder is none of these, or its files are bad.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/reading.h"
#include "tessera/comm/communicator.h"
#include "tessera/engine/rank_model.h"
#include "tessera/models/hugging_face_config.h"
#include "tessera/models/model.h"

namespace tessera::train {

// Where a model is, and what it is: no weights were read.
struct ModelSource {
  std::string path;  // of the checkpoint, or the Hugging Face folder
  bool is_checkpoint = false;
  bool averaged = false;      // its weights are their averages: read_averages()
  bool began_random = false;  // a run that loaded no weights
  bool has_updates = false;   // a run some of whose steps updated something
  models::HuggingFaceConfig config;
  // The folder that may hold the tokenizer's files.
  std::string tokenizer_folder;
  // The folder with the files of the Hugging Face folder that the model came
  // from; "": it came from none.
  std::string model_files = "";
  bool has_files_tokenizer = true;  // and no other since
  data::DataConfig data = {};       // what a run was trained on
  // A run that goes on leaves the checkpoint there meanwhile.
  std::shared_ptr<const checkpoint::Reading> reading = nullptr;
};

// The newest step-N of a run's folder, or of one with its checkpoints, of which
// the manifest is good; those that are passed over are told. "" where there is
// none at all, TS_CHECK_IO where all are bad.
std::string newest_checkpoint_in(const std::string& folder);

// `dtype`: what a checkpoint's weights are to be.
ModelSource find_trained_model(const std::string& path, c10::ScalarType dtype);

// The tokens that end a text of it: as generation_config.json has them, where
// the model came with one that says so, else as its configuration does.
// TS_CHECK_IO for a bad file.
std::vector<int64_t> stop_tokens(const ModelSource& source);

// The model's weights are to be the averages that training kept of them
// (optimizer.ema). TS_CHECK_CONFIG where there are none.
void read_averages(ModelSource& source);

// What the folder that the model came from has its weights in; fp32 where it
// came from none.
c10::ScalarType dtype_of_files(const ModelSource& source);

// Its weights are of fp64, which fp32 would round.
bool is_fp64(const ModelSource& source);

// Where model.from is set, also to a run or a checkpoint: takes its sizes, as
// engine::read_model_folder() does.
void read_model_source(engine::RunConfig& config,
                       const config::Provenance& origins);

// That weights which a run begins with are those of its model, as far as files
// say: nothing is read. TS_CHECK_IO.
void check_first_weights(const engine::RunConfig& config);

// The first weights of a run whose model.from is a run or a checkpoint, where
// it asks for them. Collective.
void load_first_weights(const engine::RunConfig& config,
                        engine::RankModel& model, comm::Group& world);

// Its parameters in this type, read when they are asked for from files that are
// verified first: they need not fit into memory. `merges`: a weight is asked
// for with what its adapter adds.
checkpoint::WholeParameter parameters_of(const ModelSource& source,
                                         c10::ScalarType dtype, bool merges);

// This rank's part, without gradients or optimizer. REQUIRES: a configuration
// with the source's model, by complete_for_evaluation(), that outlives it.
std::unique_ptr<engine::RankModel> open_for_evaluation(
    const ModelSource& source, const engine::RunConfig& config,
    comm::Communicator& ranks);

}  // namespace tessera::train
