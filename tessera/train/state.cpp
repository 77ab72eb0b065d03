#include "tessera/train/state.h"

#include <charconv>
#include <cmath>
#include <map>
#include <utility>

#include "tessera/checkpoint/manifest.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/engine/kept_states.h"

namespace tessera::train {
namespace {

// Of a run: what is more is no number of samples.
constexpr int64_t kMostSamples = int64_t{1} << 50;

checkpoint::TensorEntry entry_of(const std::string& name,
                                 const mesh::Layout& layout,
                                 const at::Tensor& local,
                                 const parallel::Composed& composed) {
  return {.name = name,
          .global_shape = layout.global_shape(),
          .box = layout.local_box(composed.mesh, composed.coord),
          .local = local,
          .owned = layout.owned_by(composed.coord),
          .holders = layout.num_holders(composed.mesh),
          .slices = nn::names_of_experts(name, layout)};
}

// What is frozen has one version.
void add_delayed(const parallel::Composed& composed, checkpoint::State& state) {
  const auto& parameters = composed.parameters->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    if (!parameter.gradient.defined()) continue;
    state.tensors.push_back(
        entry_of("delayed." + parameter.name, parameter.layout,
                 composed.parameters->shard_of_step(i), composed));
  }
}

// One number for all ranks: the first of them writes it.
checkpoint::TensorEntry scalar_entry(const std::string& name,
                                     const at::Tensor& value,
                                     const parallel::Composed& composed) {
  const std::vector<int64_t> shape = value.sizes().vec();
  return {.name = name,
          .global_shape = shape,
          .box = mesh::Box::whole(shape),
          .local = value,
          .owned = composed.mesh.rank_at(composed.coord) == 0,
          .holders = composed.mesh.world_size()};
}

// Written as text: JSON's numbers of 64 bits are not safe in every reader. 0
// where it is absent.
uint64_t hash_in(const detail::Json& json, const char* key,
                 const std::string& source) {
  if (!json.contains(key)) return 0;
  const std::string where = source + ": " + key;
  const std::string digits = detail::as_string(json[key], where);
  uint64_t hash = 0;
  const char* end = digits.data() + digits.size();
  const auto read = std::from_chars(digits.data(), end, hash);
  TS_CHECK_IO(read.ec == std::errc() && read.ptr == end, where,
              ": expected a whole number of 64 bits, got ",
              detail::in_quotes(digits), ".");
  return hash;
}

// A key of an object in it, and the key's place.
std::pair<detail::Json, std::string> part_of(const detail::Json& json,
                                             const std::string& object,
                                             const char* key,
                                             const std::string& where) {
  const auto& of = json[object];
  TS_CHECK_IO(of.is_object() && of.contains(key), where, ": ", object,
              " lacks the key ", key, ".");
  return {of[key], where + ": " + object + "." + key};
}

// Absent before the first validation, and from older versions.
std::optional<BestLoss> best_from(const detail::Json& json,
                                  const std::string& where) {
  if (!json.contains("best")) return std::nullopt;
  const auto [loss, at] = part_of(json, "best", "loss", where);
  const auto [step, step_at] = part_of(json, "best", "step", where);
  const auto [since, since_at] = part_of(json, "best", "since", where);
  return BestLoss{
      // JSON has no word for what is no number.
      .loss = loss.is_null() ? std::nan("") : detail::as_double(loss, at),
      .step = detail::as_int(step, step_at),
      .since = detail::as_int(since, since_at)};
}

// Absent where the loss was not scaled.
std::optional<optim::LossScaleState> loss_scale_in(const detail::Json& json,
                                                   const std::string& where) {
  if (!json.contains("loss_scale")) return std::nullopt;
  return engine::loss_scale_from(json["loss_scale"].dump(),
                                 where + ": loss_scale");
}

// Those that are absent: none, as in older versions.
std::vector<double> losses_in(const detail::Json& json,
                              const std::string& where) {
  std::vector<double> losses;
  if (!json.contains("losses")) return losses;
  TS_CHECK_IO(json["losses"].is_array(), where, ": losses is no list.");
  for (const auto& loss : json["losses"]) {
    losses.push_back(detail::as_double(loss, where + ": losses"));
  }
  return losses;
}

std::vector<data::Skip> left_out_in(const detail::Json& json,
                                    const std::string& where) {
  std::vector<data::Skip> all;
  if (!json.contains("left_out")) return all;
  TS_CHECK_IO(json["left_out"].is_array(), where, ": left_out is no list.");
  const std::string name = where + ": left_out";
  for (const auto& range : json["left_out"]) {
    TS_CHECK_IO(range.is_array() && range.size() == 2, name,
                " has an entry that is no pair.");
    all.push_back({.begin = detail::as_int(range[0], name),
                   .end = detail::as_int(range[1], name)});
  }
  require_ranges(all, name);
  return all;
}

// Older versions do not say: as many in each sample as in the last.
int64_t tokens_from(const detail::Json& json, int64_t samples,
                    const std::string& where) {
  if (json.contains("tokens")) {
    return detail::as_int(json["tokens"], where + ": tokens");
  }
  const auto data = json["config"].find("data");
  if (data == json["config"].end() || !data->contains("seq_len")) return 0;
  const auto seq_len =
      detail::as_int((*data)["seq_len"], where + ": config.data.seq_len");
  int64_t tokens = 0;
  return __builtin_mul_overflow(samples, seq_len, &tokens) ? 0 : tokens;
}

// Older versions do not say, and took as many in each step.
int64_t samples_from(const detail::Json& json, const std::string& where) {
  if (json.contains("samples")) {
    const auto samples = detail::as_int(json["samples"], where + ": samples");
    TS_CHECK_IO(samples >= 0 && samples <= kMostSamples, where, ": ", samples,
                " is no number of samples.");
    return samples;
  }
  const auto batch = json["config"].find("batch");
  if (batch == json["config"].end() || !batch->contains("global")) return 0;
  return detail::as_int(json["step"], where + ": step") *
         detail::as_int((*batch)["global"], where + ": config.batch.global");
}

}  // namespace

std::string master_of(const std::string& parameter) {
  return "optimizer.master." + parameter;
}

checkpoint::State weights_of(const parallel::Composed& composed) {
  checkpoint::State state;
  for (const auto& parameter : composed.parameters->parameters()) {
    state.tensors.push_back(entry_of("model." + parameter.name,
                                     parameter.layout, parameter.shard,
                                     composed));
    state.tensors.back().finer = master_of(parameter.name);
  }
  return state;
}

checkpoint::State state_of(const parallel::Composed& composed,
                           const optim::Optimizer& optimizer) {
  checkpoint::State state = weights_of(composed);
  std::map<std::string, const mesh::Layout*> layouts;
  for (const auto& parameter : composed.parameters->parameters()) {
    layouts[parameter.name] = &parameter.layout;
  }
  for (const auto& item : optimizer.state()) {
    const std::string name = "optimizer." + item.name;
    state.tensors.push_back(item.parameter.empty()
                                ? scalar_entry(name, item.tensor, composed)
                                : entry_of(name, *layouts.at(item.parameter),
                                           item.tensor, composed));
  }
  if (composed.units.versions.parameters > 1) add_delayed(composed, state);
  return state;
}

std::string to_json(const SavedRun& run) {
  detail::Json json;
  json["step"] = run.step;
  json["samples"] = run.samples;
  json["tokens"] = run.tokens;
  json["data"] = std::to_string(run.data);
  if (run.caches != 0) json["caches"] = std::to_string(run.caches);
  json["config"] = detail::Json::parse(run.config);
  if (run.best) {
    json["best"] = {{"loss", run.best->loss},
                    {"step", run.best->step},
                    {"since", run.best->since}};
  }
  if (run.skipped > 0) json["skipped"] = run.skipped;
  if (run.loss_scale) {
    json["loss_scale"] = detail::Json::parse(engine::to_json(*run.loss_scale));
  }
  if (!run.losses.empty()) json["losses"] = run.losses;
  if (run.num_rewinds > 0) json["rewinds"] = run.num_rewinds;
  if (run.line_base >= 0) json["line_base"] = run.line_base;
  for (const auto& [begin, end] : run.left_out) {
    json["left_out"].push_back({begin, end});
  }
  return json.dump();
}

SavedRun saved_run_from(const std::string& text, const std::string& source) {
  const detail::Json json = detail::parse_json(text, source);
  const auto count = [&](const char* key, int64_t absent = 0) {
    if (!json.contains(key)) return absent;
    const std::string where = source + ": " + key;
    const int64_t number = detail::as_int(json[key], where);
    TS_CHECK_IO(number >= 0, where, " is ", number, ", and counts something.");
    return number;
  };
  for (const char* key : {"step", "data", "config"}) {
    TS_CHECK_IO(json.contains(key), source, ": the key ", key,
                " is missing; this is no checkpoint of tessera train.");
  }
  const int64_t samples = samples_from(json, source);
  const uint64_t data = hash_in(json, "data", source);
  return {.step = detail::as_int(json["step"], source + ": step"),
          .samples = samples,
          .tokens = tokens_from(json, samples, source),
          .config = json["config"].dump(2) + "\n",
          .data = json.contains("tokens") ? data : 0,
          .caches = hash_in(json, "caches", source),
          .best = best_from(json, source),
          .skipped = count("skipped"),
          .loss_scale = loss_scale_in(json, source),
          .losses = losses_in(json, source),
          .num_rewinds = count("rewinds"),
          .left_out = left_out_in(json, source),
          .line_base = count("line_base", -1)};
}

void require_ranges(const std::vector<data::Skip>& ranges,
                    const std::string& where) {
  int64_t behind = 0;
  for (const auto& [begin, end] : ranges) {
    TS_CHECK_IO(begin >= behind && end > begin && end <= kMostSamples, where,
                ": samples ", begin, " to ", end,
                " are no range behind the one before.");
    behind = end + 1;
  }
}

std::string left_out_text(const std::vector<data::Skip>& ranges,
                          const SavedRun& run, int64_t global_batch) {
  const bool is_even = run.samples == run.step * global_batch;
  std::vector<std::string> texts;
  for (const data::Skip& range : ranges) {
    texts.push_back(data::text_of(range, is_even ? global_batch : 0));
  }
  return some_of(texts, 16);
}

void check_resume(const std::string& resume, const std::string& folder) {
  TS_CHECK_CONFIG(resume != "never" || !checkpoint::has_checkpoints(folder),
                  "--resume never, but ", folder,
                  " holds checkpoints, which a new run would replace. Give the "
                  "run another name (run.name), or remove that folder.");
}

std::optional<Resumed> resume(const std::string& resume,
                              const std::string& folder,
                              checkpoint::LocalCheckpoints* local,
                              checkpoint::State& state, comm::Group& world) {
  check_resume(resume, folder);
  if (resume == "never") return std::nullopt;
  std::optional<int64_t> step;
  std::string source = folder;
  const bool is_auto = resume == "auto";
  if (is_auto && local != nullptr) step = local->load_newest(state);
  const bool is_local = step.has_value();
  if (is_local) {
    source = local->folder();
  } else if (is_auto) {
    step = checkpoint::load_latest(folder, state, world);
  } else {
    step = checkpoint::load(resume, state, world);
    source = resume;
  }
  if (!step) return std::nullopt;
  source += ": state of step " + std::to_string(*step);
  Resumed resumed{.run = saved_run_from(state.extra, source),
                  .is_local = is_local};
  TS_CHECK_IO(resumed.run.step == *step, source, ": says that it is of step ",
              resumed.run.step, ".");
  return resumed;
}

}  // namespace tessera::train
