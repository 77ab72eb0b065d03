// What `tessera inspect` says of the size of a model that a file names.
#pragma once

#include <functional>

#include "tessera/core/detail/json.h"
#include "tessera/models/model_config.h"

namespace tessera::cli {

// Adds `parameters` and `active_parameters`, those that one token goes through;
// where `model` throws an Error, what it says in place of both.
void add_parameters(detail::Json& json,
                    const std::function<models::ModelConfig()>& model);

}  // namespace tessera::cli
