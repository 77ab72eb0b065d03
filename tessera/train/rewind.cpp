#include "tessera/train/rewind.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "tessera/checkpoint/local_place.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/train/state.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

// Where a run can go on from.
struct Source {
  std::string resume;
  int64_t samples = 0;  // that were taken by then
  std::string name;     // for people
};

// Of this line of steps, newest first: one that a run went back to is committed
// behind those that it left, whose steps lie behind it.
std::vector<int64_t> steps_of_this_line(const std::string& checkpoints) {
  std::vector<int64_t> steps;
  for (const auto& found : checkpoint::list_checkpoints(checkpoints)) {
    if (!found.complaint.empty()) continue;
    if (steps.empty() || found.step < steps.back()) steps.push_back(found.step);
  }
  return steps;
}

// The newest that lies far enough before the spike, else the oldest.
std::optional<int64_t> step_to_go_to(const std::string& checkpoints,
                                     int64_t spike, int64_t before) {
  std::optional<int64_t> found;
  for (const int64_t step : steps_of_this_line(checkpoints)) {
    if (step >= spike) continue;
    found = step;
    if (step < spike - before) break;
  }
  return found;
}

Source source_in(const checkpoint::Manifest& manifest,
                 const std::string& folder) {
  return {.resume = folder,
          .samples = saved_run_from(manifest.extra, folder).samples,
          .name = c10::str("the checkpoint after step ", manifest.step)};
}

// Whether the run goes on from its own checkpoints by now.
bool is_of_own(const SpikePlace& spike, const std::string& checkpoints) {
  if (spike.resume == "auto" || spike.has_saved) return true;
  std::error_code none;
  return fs::equivalent(fs::path(spike.resume) / "..", checkpoints, none);
}

Source find_source(const engine::RunConfig& config, const RunFolder& folder,
                   const SpikePlace& spike) {
  const std::string checkpoints = folder.checkpoints();
  if (is_of_own(spike, checkpoints)) {
    const auto step =
        step_to_go_to(checkpoints, spike.step, config.spike.skip_before);
    if (step) {
      const std::string path = c10::str(checkpoints, "/step-", *step);
      return source_in(checkpoint::read_manifest(path), path);
    }
    const std::string local =
        config.checkpoint.saves_locally()
            ? checkpoint::newest_local_checkpoint(folder.local())
            : "";
    if (!local.empty()) {
      Source found = source_in(checkpoint::read_manifest_alone(local), local);
      found.resume = "auto";
      return found;
    }
  }
  return {.resume = spike.resume,
          .samples = spike.first_samples,
          .name = spike.resume == "auto" || spike.resume == "never"
                      ? "the beginning"
                      : spike.resume};
}

}  // namespace

Rewind find_rewind(const engine::RunConfig& config, const RunFolder& folder,
                   const data::Sampler& sampler, const SpikePlace& spike,
                   comm::Group& world) {
  const auto& [action, window, deviations, before, after, most] = config.spike;
  TS_CHECK(spike.before.count < most, "the spike at step ", spike.step,
           " comes after the run has gone back ", spike.before.count,
           " times, which is all that spike.most allows. Batches are not what "
           "makes it: go on from an earlier checkpoint (--resume PATH) with a "
           "lower optimizer.lr or a smaller optimizer.clip_norm, or set "
           "spike.most higher.");
  Source source;
  const std::string complaint = comm::first_complaint_of(
      world, "looking for a checkpoint before a spike", [&] {
        if (world.rank() == 0) source = find_source(config, folder, spike);
      });
  TS_CHECK_IO(complaint.empty(), complaint);
  source.resume = comm::text_of_rank_0(world, source.resume);
  source.samples = comm::numbers_of_rank_0(world, {source.samples})[0];

  // The spike's step counts from 1, those of the sampler from 0.
  const int64_t step = spike.step - 1;
  const int64_t first =
      std::max(source.samples, sampler.taken_before(step - before));
  const data::Skip out = {
      .begin = sampler.position_of(first),
      .end = sampler.position_of(sampler.taken_before(step + after + 1) - 1) +
             1};
  Rewind rewind = spike.before;
  rewind.resume = source.resume;
  ++rewind.count;
  rewind.left_out.push_back(out);
  rewind.left_out = data::joined(std::move(rewind.left_out));
  if (world.rank() == 0) {
    log::warning("going back to ", source.name, ", and on without ",
                 data::text_of(out, config.batch.global), " of data.train: time ",
                 rewind.count, " of ", most, " (spike.most)");
  }
  return rewind;
}

}  // namespace tessera::train
