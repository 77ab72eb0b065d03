#include "tessera/engine/batch_config.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <optional>

#include "tessera/core/error.h"

namespace tessera::engine {
namespace {

// Calls `consider` with each number of parts of a size, in no order.
template <typename Consider>
void each_cut(int64_t samples, const Consider& consider) {
  for (int64_t count = 1; count * count <= samples; ++count) {
    if (samples % count != 0) continue;
    consider(count);
    consider(samples / count);
  }
}

// In how many micro-batches, as few as can be, `samples` are cut of which each
// has `fewest` to `most`.
std::optional<int64_t> cut_evenly(int64_t samples, int64_t fewest,
                                  int64_t most) {
  std::optional<int64_t> best;
  each_cut(samples, [&](int64_t count) {
    const int64_t each = samples / count;
    if (each < fewest || each > most) return;
    best = std::min(best.value_or(count), count);
  });
  return best;
}

// The least batch.micro with which they can be cut. REQUIRES: a sample for each
// of `degree`.
int64_t least_micro(int64_t samples, int64_t degree) {
  int64_t least = samples;
  each_cut(samples, [&](int64_t count) {
    if (samples / count >= degree) least = std::min(least, samples / count);
  });
  return at::ceil_div(least, degree);
}

}  // namespace

void BatchConfig::declare(config::Section& section) {
  section.key("global", global, "samples a step, over all ranks")
      .at_least(1)
      .at_most(1e9);
  section
      .key("micro", micro,
           "samples a micro-batch on a rank, in the mean where these have not "
           "as many; with uneven at most so many; 0: a rank's whole share of "
           "global")
      .at_least(0)
      .at_most(1e9);
  section.key("uneven", uneven,
              "where global is no multiple of micro x data-parallel degree, "
              "micro-batches as large as fit are cut, of which some ranks take "
              "a sample less; else it is refused");
}

void BatchConfig::complete(int64_t degree, int64_t world_size) {
  const bool known_micro = micro > 0;
  const int64_t multiple = degree * std::max<int64_t>(micro, 1);
  if (uneven && global % multiple != 0) return complete_unevenly(degree);
  const int64_t below = global / multiple * multiple;
  const int64_t most = known_micro ? multiple : global;
  const bool helps = degree > 1 && cut_evenly(global, degree, most);
  TS_CHECK_CONFIG(
      global % multiple == 0, "batch: batch.global ", global, " = batch.micro ",
      known_micro ? std::to_string(micro) : "?",
      " x accumulation ? x data-parallel degree ", degree, " (", world_size,
      world_size == 1 ? " rank" : " ranks",
      world_size > degree ? c10::str(", ", world_size / degree, " to a replica")
                          : "",
      ") has no solution: ", global, " is no multiple of ", multiple,
      ". Nearest batch.global: ", below > 0 ? c10::str(below, " or ") : "",
      below + multiple,
      helps ? ". With batch.uneven true some ranks take fewer samples than "
              "others."
            : ".");
  if (!known_micro) micro = global / degree;
  check_count(degree);
}

void BatchConfig::complete_unevenly(int64_t degree) {
  TS_CHECK_CONFIG(global >= degree, "batch.global ", global, " leaves some of ",
                  degree,
                  " data-parallel ranks without a sample, also with "
                  "batch.uneven. Nearest batch.global: ",
                  degree, ".");
  if (micro == 0) micro = at::ceil_div(global, degree);
  const auto count = cut_evenly(global, degree, micro * degree);
  TS_CHECK_CONFIG(
      count, "batch.global ", global,
      " cannot be cut into micro-batches of a size that have a sample for each "
      "of ",
      degree, " data-parallel ranks and at most batch.micro ", micro,
      " in the mean. Nearest batch.micro: ", least_micro(global, degree), ".");
  micro = at::ceil_div(global / *count, degree);
  check_count(degree);
}

// All of a step's instructions are in memory before it runs.
void BatchConfig::check_count(int64_t degree) const {
  constexpr int64_t kMost = int64_t{1} << 16;
  const int64_t count = microbatches(degree);
  TS_CHECK_CONFIG(count <= kMost, "batch.global ", global, " in parts of ",
                  micro, " samples on each of ", degree,
                  " data-parallel ranks is ", count,
                  " micro-batches a step; at most ", kMost,
                  " fit into a program. Nearest batch.micro: ",
                  at::ceil_div(global, kMost * degree), " or more.");
}

int64_t BatchConfig::microbatches(int64_t degree) const {
  const int64_t most = micro * degree;
  return global % most == 0 ? global / most
                            : cut_evenly(global, degree, most).value();
}

}  // namespace tessera::engine
