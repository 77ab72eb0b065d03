#include "cli/checkpoint_words.h"

#include <string>

#include "tessera/train/state.h"

namespace tessera::cli {
namespace {

using detail::Json;

// At dotted.name; null where there is none.
Json found_at(const Json& json, const std::string& dotted) {
  const size_t dot = dotted.find('.');
  const auto found =
      json.is_object() ? json.find(dotted.substr(0, dot)) : json.end();
  if (found == json.end()) return {};
  return dot == dotted.npos ? *found : found_at(*found, dotted.substr(dot + 1));
}

// "adamw, with averages of the weights (ema 0.999)".
Json optimizer_words(const Json& section) {
  const Json type = found_at(section, "type"), ema = found_at(section, "ema");
  if (!type.is_string()) return {};
  std::string words = type;
  if (ema.is_number() && ema != 0) {
    words += ", with averages of the weights (ema " + ema.dump() + ")";
  }
  return words;
}

// What spike.action rewind left out; null: nothing. `extra` is `said`'s text.
Json left_out_words(const Json& said, const std::string& extra) {
  if (found_at(said, "left_out").is_null()) return {};
  const auto saved = train::saved_run_from(extra, "extra");
  const Json batch = found_at(said, "config.batch.global");
  return train::left_out_text(saved.left_out, saved,
                              batch.is_number_integer() ? int64_t{batch} : 0);
}

std::string words_in(const Json& text) {
  const bool has_some = text.is_string() && !text.get<std::string>().empty();
  return has_some ? text.dump() : "none";
}

}  // namespace

Json words_of(const std::string& extra) {
  const Json said = Json::parse(extra, nullptr, /*allow_exceptions=*/false);
  const Json config = found_at(said, "config"),
             optimizer = found_at(said, "optimizer");
  Json words = Json::object();
  if (config.is_object()) {
    words["written by"] =
        "tessera train, of the run " + found_at(config, "run.name").dump();
    words["model"] = found_at(config, "model.family");
    words["precision"] = found_at(config, "precision.compute");
    words["optimizer"] = optimizer_words(found_at(config, "optimizer"));
    const Json left_out = left_out_words(said, extra);
    if (!left_out.is_null()) words["left out, by spikes"] = left_out;
  } else if (optimizer.is_string()) {
    words["written by"] =
        "tessera::ShardedCheckpoint in a program of one's own, whose load() "
        "reads it";
    words["optimizer"] = "torch::optim::" + optimizer.get<std::string>();
    words["client state"] = words_in(found_at(said, "client_state"));
  } else if (!found_at(said, "hysteresis_left").is_null()) {
    words["written by"] =
        "the engine of tessera::initialize() in a program of one's own, whose "
        "load_checkpoint() reads it";
    words["optimizer"] = optimizer_words(optimizer);
    words["client state"] = words_in(found_at(said, "client_state"));
  } else {
    words["written by"] = "a program of one's own";
  }
  return words;
}

}  // namespace tessera::cli
