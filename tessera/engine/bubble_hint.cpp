#include "tessera/engine/bubble_hint.h"

#include <ATen/ceil_div.h>
#include <c10/util/StringUtil.h>

#include <cmath>
#include <vector>

#include "tessera/core/units.h"
#include "tessera/engine/step_drawing.h"
#include "tessera/program/schedules/equal_stages.h"

namespace tessera::engine {
namespace {

using program::schedules::Schedule;
using program::schedules::Shape;

double bubble_of(const Schedule& schedule, const Shape& shape) {
  return program::schedules::simulate(schedule, shape, program::Times{},
                                      /*message=*/0, /*lowered=*/false)
      .bubble();
}

bool is_enough(const Schedule& schedule, Shape shape, int64_t microbatches,
               double half) {
  shape.num_microbatches = microbatches;
  return program::schedules::takes(schedule, shape) &&
         bubble_of(schedule, shape) <= half + 1e-9;
}

// So many micro-batches that they halve the bubble, as keys: of the same batch
// where it can be cut so. A bubble lasts as long however many there are.
std::string halving_batch(const RunConfig& config, const Schedule& schedule,
                          const Shape& shape, double bubble) {
  const int64_t now = shape.num_microbatches;
  const int64_t replicas = data_parallel_degree(config);
  const int64_t global = config.batch.global;
  const double ideal = static_cast<double>(now) / (1 - bubble);
  const auto least = static_cast<int64_t>(std::ceil(now + ideal - 1e-9));
  for (int64_t m = least; m <= global / replicas; ++m) {
    const bool is_even = global % (m * replicas) == 0;
    if (!is_even && !(config.batch.uneven && global % m == 0)) continue;
    BatchConfig cut = config.batch;
    cut.micro = at::ceil_div(global / m, replicas);
    if (cut.microbatches(replicas) == m &&
        is_enough(schedule, shape, m, bubble / 2)) {
      return c10::str(m, " micro-batches (batch.micro ", cut.micro, ")");
    }
  }
  for (int64_t m = least; m <= least + 2 * shape.stages; ++m) {
    if (is_enough(schedule, shape, m, bubble / 2)) {
      return c10::str(m, " micro-batches (batch.global ",
                      m * config.batch.micro * replicas, ")");
    }
  }
  return "";
}

// Another schedule with half of the bubble, as keys; "": none.
std::string halving_schedule(const RunConfig& config, Shape shape,
                             double half) {
  for (const char* name : {"interleaved", "zb_h1", "zb_v"}) {
    const Schedule& other = program::schedules::named(name);
    shape.chunks = other.chunked ? 2 : 1;
    if (shape.stages * shape.chunks > config.model.layers ||
        !program::schedules::takes(other, shape) ||
        bubble_of(other, shape) > half + 1e-9) {
      continue;
    }
    return c10::str("pipeline.schedule ", name,
                    other.chunked ? " with pipeline.chunks 2" : "");
  }
  return "";
}

}  // namespace

std::string bubble_hint(const RunConfig& config) {
  const int64_t stages = config.mesh.pp, microbatches = accumulation(config);
  if (config.mesh.star() || stages < 2 || microbatches >= 2 * stages) return "";
  const Schedule& schedule =
      program::schedules::named(config.pipeline.schedule);
  if (schedule.delayed) return "";  // it fills no pipeline anew
  const Shape shape{.stages = stages,
                    .chunks = config.pipeline.num_chunks(),
                    .num_microbatches = microbatches,
                    .reversed = config.pipeline.order == "reverse"};
  const double bubble = bubble_of(schedule, shape);
  if (bubble < 0.01) return "";
  std::vector<std::string> ways;
  const auto batch = halving_batch(config, schedule, shape, bubble);
  if (!batch.empty()) ways.push_back(batch);
  const auto other = halving_schedule(config, shape, bubble / 2);
  if (!other.empty()) ways.push_back(other);
  std::string hint = c10::str(
      "pipeline: ", microbatches, " micro-batches for ", stages,
      " stages are fewer than two a stage: ", percent(bubble), " of a step of ",
      schedule.name, " is bubble, in which stages wait for each other.");
  if (!ways.empty()) {
    hint += c10::str(" ", c10::Join(" or ", ways), " would halve that.");
  }
  return hint;
}

}  // namespace tessera::engine
