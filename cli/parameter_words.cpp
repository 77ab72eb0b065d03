#include "cli/parameter_words.h"

#include "tessera/core/error.h"
#include "tessera/models/model.h"

namespace tessera::cli {

void add_parameters(detail::Json& json,
                    const std::function<models::ModelConfig()>& model) {
  try {
    const auto count = models::count_parameters(model());
    json["parameters"] = count.all;
    json["active_parameters"] = count.active;
  } catch (const Error& error) {
    json["parameters"] = message_of(error);
  }
}

}  // namespace tessera::cli
