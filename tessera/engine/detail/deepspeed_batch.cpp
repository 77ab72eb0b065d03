// The batch of DeepSpeed's file: three numbers of which two give the third.
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <optional>

#include "tessera/core/error.h"
#include "tessera/engine/detail/deepspeed_settings.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::engine::detail {
namespace {

constexpr int64_t kMost = 1'000'000'000;

struct Number {
  std::optional<int64_t> value = {};
  std::string origin = "";

  int64_t or_one() const { return value.value_or(1); }
  std::string text() const {
    return value ? std::to_string(*value) : std::string("?");
  }
  std::string described(const char* name) const {
    if (!value) return std::string(name) + " is open";
    return c10::str(name, " is ", *value, " (", origin, ")");
  }
};

class Equation {
 public:
  Equation(const DeepSpeedValues& values, const RunConfig& config,
           const config::Provenance& origins, int64_t world_size)
      : source_(values.source()) {
    const auto mesh = config.mesh.mesh(world_size, config.zero.stage);
    const auto degree_of = [&](mesh::Axis axis) { return mesh.degree(axis); };
    degree_ =
        degree_of(mesh::Axis::kDpReplicate) * degree_of(mesh::Axis::kDpShard);
    ranks_of_model_ = world_size / degree_;
    uneven_ = config.batch.uneven;
    const auto of_run = [&](const char* key, int64_t value) {
      const bool counts = config::is_set(origins, key) && value > 0;
      return counts ? Number{value, origins.at(key)} : Number{};
    };
    batch_ = of_run("batch.global", config.batch.global);
    micro_ = of_run("batch.micro", config.batch.micro);
    if (const auto* given = values.find("gradient_accumulation_steps")) {
      steps_ = {given->value.get<int64_t>(), given->origin};
    }
    // Steps alone are of the batch that a run has anyhow.
    if (steps_.value && !batch_.value && !micro_.value) {
      batch_ = {config.batch.global, "batch.global's default"};
    }
  }

  std::vector<DeepSpeedSetting> solved() const {
    const int64_t known = product_of_known();
    if (!batch_.value) {
      return {set("batch.global", known,
                  "train_micro_batch_size_per_gpu x " + factors())};
    }
    const int64_t batch = *batch_.value;
    const bool is_full = micro_.value && steps_.value;
    const bool holds = is_full ? batch == known : batch % known == 0;
    if (!holds && uneven_ && !steps_.value) return {};  // the run shares it out
    if (!holds) refuse(batch, known, is_full);
    if (micro_.value) return {};
    return {set("batch.micro", batch / known,
                "train_batch_size / (" + factors() + ")")};
  }

 private:
  int64_t product_of_known() const {
    int64_t known = degree_;
    const bool is_beyond = c10::mul_overflows(known, micro_.or_one(), &known) ||
                           c10::mul_overflows(known, steps_.or_one(), &known);
    TS_CHECK_CONFIG(!is_beyond, "batch: ", degree_, " x ", micro_.text(), " x ",
                    steps_.text(), " samples are more than can be counted. ",
                    steps_.described("gradient_accumulation_steps"), ", ",
                    micro_.described("train_micro_batch_size_per_gpu"), ".");
    return known;
  }

  DeepSpeedSetting set(const char* key, int64_t value,
                       const std::string& how) const {
    return {.key = key, .value = value, .origin = source_ + ": " + how};
  }

  // Beside the batch and the micro-batch.
  std::string factors() const {
    return c10::str("data-parallel degree ", degree_,
                    steps_.value ? " x gradient_accumulation_steps" : "");
  }

  std::string ranks() const {
    const int64_t world = degree_ * ranks_of_model_;
    return c10::str(world, world == 1 ? " rank" : " ranks",
                    ranks_of_model_ > 1
                        ? c10::str(", ", ranks_of_model_, " to a replica")
                        : "");
  }

  // "2 or 4": the degrees beside this one that the batch can be cut by.
  std::string nearest_degrees(int64_t share) const {
    std::string text;
    int64_t below = std::min(degree_ - 1, share), above = degree_ + 1;
    while (below > 0 && share % below != 0) --below;
    while (above <= share && share % above != 0) ++above;
    if (below > 0) text = std::to_string(below);
    if (above <= share) text += (below > 0 ? " or " : "") + c10::str(above);
    return text;
  }

  void refuse(int64_t batch, int64_t known, bool is_full) const {
    const int64_t below = batch / known * known;
    std::string nearest =
        is_full
            ? std::to_string(known)
            : c10::str(below > 0 ? c10::str(below, " or ") : "", below + known);
    nearest = c10::str("Nearest train_batch_size: ", nearest);
    const int64_t others = micro_.or_one() * steps_.or_one();
    if (batch % others == 0) {
      const int64_t share = batch / others;
      const auto degrees =
          is_full ? std::to_string(share) : nearest_degrees(share);
      nearest += c10::str("; nearest data-parallel degree: ", degrees);
    }
    TS_CHECK_CONFIG(
        false, "batch: ", batch, " = ", degree_, " x ", micro_.text(), " x ",
        steps_.text(), is_full ? " does not hold: " : " has no solution: ",
        batch_.described("train_batch_size"), ", the data-parallel degree is ",
        degree_, " (", ranks(), "), ",
        micro_.described("train_micro_batch_size_per_gpu"), ", ",
        steps_.described("gradient_accumulation_steps"), ". ", nearest,
        is_full ? "; or leave one of the three out." : ".");
  }

  std::string source_;
  int64_t degree_ = 1;
  int64_t ranks_of_model_ = 1;
  bool uneven_ = false;
  Number batch_, micro_, steps_;
};

// Whether the file gives any of the three numbers, which are checked.
bool says_of_batch(const DeepSpeedValues& values) {
  bool says = false;
  for (const char* name : {"train_batch_size", "train_micro_batch_size_per_gpu",
                           "gradient_accumulation_steps"}) {
    const DeepSpeedValue* given = values.find(name);
    says |= given != nullptr;
    TS_CHECK_CONFIG(!given || given->value >= 1, given->origin, " is ",
                    given->value.dump(), ": it must be at least 1.");
    TS_CHECK_CONFIG(!given || given->value <= kMost, given->origin, " is ",
                    given->value.dump(), ": it must be at most ", kMost, ".");
  }
  return says;
}

}  // namespace

std::vector<DeepSpeedSetting> batch_settings(const DeepSpeedValues& values,
                                             const RunConfig& config,
                                             const config::Provenance& origins,
                                             int64_t world_size) {
  if (!says_of_batch(values)) return {};
  return Equation(values, config, origins, world_size).solved();
}

std::string check_searched_batch(const DeepSpeedValues& values,
                                 const RunConfig& config,
                                 const config::Provenance& origins) {
  if (!says_of_batch(values)) return "";
  const bool has_micro =
      config::is_set(origins, "batch.micro") && config.batch.micro > 0;
  TS_CHECK_CONFIG(config::is_set(origins, "batch.global") || !has_micro,
                  "batch: train_batch_size is open, and would follow from the "
                  "data-parallel degree, which is searched: "
                  "train_micro_batch_size_per_gpu is ",
                  config.batch.micro, " (", origins.at("batch.micro"),
                  "). Give train_batch_size, or batch.global.");
  const auto* steps = values.find("gradient_accumulation_steps");
  if (!steps) return "";
  return c10::str(steps->origin, " is ", steps->value.dump(),
                  ", without effect on a search: what a rank accumulates "
                  "follows from batch.global and from the layout");
}

}  // namespace tessera::engine::detail
