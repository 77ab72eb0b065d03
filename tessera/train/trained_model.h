// A model that training left behind, opened whole on one rank.
//
// Takes:  a checkpoint folder (step-N), a run folder (its newest checkpoint),
//         or a Hugging Face folder.
// Errors: TS_CHECK_IO where the folder is none of these, or its files are bad.
#pragma once

#include <c10/core/ScalarType.h>

#include <memory>
#include <string>

#include "tessera/models/hugging_face_config.h"
#include "tessera/models/model.h"

namespace tessera::train {

struct TrainedModel {
  std::shared_ptr<models::Model> decoder;
  models::HuggingFaceConfig config;
  // The folder that may hold the tokenizer's files.
  std::string tokenizer_folder;
};

TrainedModel open_trained_model(const std::string& path, c10::ScalarType dtype);

}  // namespace tessera::train
