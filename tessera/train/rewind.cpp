#include "tessera/train/rewind.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/local_place.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/hash.h"
#include "tessera/core/log.h"

namespace tessera::train {
namespace {

// Where a run can go on from.
struct Source {
  std::string resume;
  int64_t samples = 0;          // that were taken by then
  std::string name;             // for people
  std::string checkpoint = {};  // its folder, where it is one of the run
};

bool is_of_own_folder(const Rewind& so_far, const RunFolder& folder) {
  return so_far.resume == "auto" ||
         checkpoint::is_checkpoint_in(folder.checkpoints(), so_far.resume);
}

// Those on the newest commit's line of steps, it first, each with the one that
// it was trained on from. What a run left by going back is on another; a later
// commit may have taken its place. `base`: SavedRun::line_base.
std::vector<int64_t> steps_of_this_line(const RunFolder& folder, int64_t base) {
  std::set<int64_t> good;
  std::optional<int64_t> next;
  for (const auto& found : checkpoint::list_checkpoints(folder.checkpoints())) {
    if (!found.complaint.empty()) continue;
    if (!next) next = found.step;
    good.insert(found.step);
  }
  std::vector<int64_t> steps;
  int64_t sequence = std::numeric_limits<int64_t>::max();
  while (next && good.contains(*next)) {
    const auto manifest = checkpoint::read_manifest(
        checkpoint::step_folder(folder.checkpoints(), *next));
    const bool is_before = manifest.sequence < sequence &&
                           manifest.sequence > base &&
                           (steps.empty() || *next < steps.back());
    if (!is_before) break;
    steps.push_back(*next);
    sequence = manifest.sequence;
    next = manifest.parent;
  }
  return steps;
}

// Those before the spike: first what lies far enough before it, from the newest
// on, then what is nearer, from the oldest on.
std::vector<int64_t> steps_to_go_to(const RunFolder& folder,
                                    const SpikePlace& spike,
                                    int64_t skip_before) {
  std::vector<int64_t> far, near;
  for (const int64_t step :
       steps_of_this_line(folder, spike.so_far.line_base)) {
    if (step >= spike.step) continue;
    const bool is_far = step < spike.step - skip_before;
    is_far ? far.push_back(step) : near.push_back(step);
  }
  std::ranges::reverse_copy(near, std::back_inserter(far));
  return far;
}

// Where no checkpoint of its folder is one to go back to.
Source source_beside(const engine::RunConfig& config, const RunFolder& folder,
                     const SpikePlace& spike, bool is_own) {
  const std::string local =
      is_own && config.checkpoint.saves_locally()
          ? checkpoint::newest_local_checkpoint(folder.local())
          : "";
  if (!local.empty()) {
    const auto manifest = checkpoint::read_manifest_alone(local);
    if (manifest.step < spike.step) {
      return {.resume = "auto",
              .samples = saved_run_from(manifest.extra, local).samples,
              .name = c10::str("the checkpoint after step ", manifest.step),
              .checkpoint = local};
    }
  }
  const std::string& resume = spike.so_far.resume;
  const bool is_path = resume != "auto" && resume != "never";
  return {
      .resume = resume,
      .samples = spike.first_samples,
      .name = is_path ? resume : "the beginning",
      .checkpoint = checkpoint::is_checkpoint_in(folder.checkpoints(), resume)
                        ? resume
                        : ""};
}

// The first whose bytes are as they were written; nothing: there is none.
std::optional<int64_t> first_good_of(const std::vector<int64_t>& steps,
                                     const RunFolder& folder,
                                     comm::Group& world) {
  for (const int64_t step : steps) {
    const std::string path =
        checkpoint::step_folder(folder.checkpoints(), step);
    const std::string complaint = checkpoint::complaint_about(path, world);
    if (complaint.empty()) return step;
    if (world.rank() == 0) {
      log::warning("checkpoint: ", path, " is not used: ", complaint);
    }
  }
  return std::nullopt;
}

// The same on every rank.
Source find_source(const engine::RunConfig& config, const RunFolder& folder,
                   const SpikePlace& spike, comm::Group& world) {
  const char* const doing = "looking for a checkpoint before a spike";
  bool is_own = false;
  std::vector<int64_t> steps;
  comm::on_first(world, doing, [&] {
    is_own = spike.has_saved || is_of_own_folder(spike.so_far, folder);
    if (!is_own) return;
    steps = steps_to_go_to(folder, spike, config.spike.skip_before);
  });
  steps = comm::numbers_of_rank_0(world, std::move(steps));
  const auto step = first_good_of(steps, folder, world);
  Source source;
  comm::on_first(world, doing, [&] {
    if (!step) {
      source = source_beside(config, folder, spike, is_own);
      const bool begins_anew =
          source.resume == "auto" && !config.checkpoint.saves_locally();
      TS_CHECK_IO(steps.empty() || !begins_anew, "none of the ", steps.size(),
                  " checkpoints in ", folder.checkpoints(),
                  " that lie before the spike at step ", spike.step,
                  " can be used. Go on from another (--resume PATH).");
      return;
    }
    const std::string path =
        checkpoint::step_folder(folder.checkpoints(), *step);
    const auto manifest = checkpoint::read_manifest(path);
    source = {.resume = path,
              .samples = saved_run_from(manifest.extra, path).samples,
              .name = c10::str("the checkpoint after step ", *step),
              .checkpoint = path};
  });
  source.resume = comm::text_of_rank_0(world, source.resume);
  source.samples = comm::numbers_of_rank_0(world, {source.samples})[0];
  return source;
}

std::string file_of(const RunFolder& folder) {
  return folder.checkpoints() + "/" + kRewoundName;
}

// A checkpoint, whatever stands by its name later.
std::string identity_of(const std::string& path) {
  const auto manifest = checkpoint::read_manifest_alone(path);
  return c10::str("step-", manifest.step, " ",
                  hash64(checkpoint::format_manifest(manifest)));
}

// That identity; how often the run went back, now to this one; and each range.
void keep(const RunFolder& folder, const std::string& path,
          const Rewind& rewind) {
  std::string text =
      c10::str(identity_of(path), "\n", rewind.num_rewinds, "\n");
  for (const auto& [begin, end] : rewind.left_out) {
    text += c10::str(begin, " ", end, "\n");
  }
  write_file_atomic(file_of(folder), text);
}

// What is there is of the line that the run leaves, and may be newer.
void forget_memory(const RunFolder& folder) {
  const std::string left =
      checkpoint::forget_local_checkpoints(folder.checkpoints());
  if (left.empty()) return;
  log::info(left,
            " on each host is not gone on from any more; the next checkpoint "
            "there takes its place");
}

// What a run had left out when it went back to the checkpoint that it goes on
// from now, and was ended before the next one. Collective.
Rewind kept_rewind(const RunFolder& folder, const Resumed& found,
                   comm::Group& world) {
  // Nothing: there is no file, or it is of another checkpoint.
  std::optional<std::string> text;
  comm::on_first(world, "reading " + file_of(folder), [&] {
    if (!std::filesystem::exists(file_of(folder))) return;
    const std::string path = checkpoint::step_folder(
        found.is_local ? checkpoint::local_checkpoint_folder(folder.local())
                       : folder.checkpoints(),
        found.run.step);
    if (!std::filesystem::exists(path)) {  // the memory of other hosts had it
      return log::warning(file_of(folder),
                          " may be of the checkpoint that the run goes on "
                          "from, which this host does not have: what was left "
                          "out before it is taken again");
    }
    text = read_file(file_of(folder));
    const std::string first = identity_of(path) + "\n";
    if (text->starts_with("step-") && !text->starts_with(first)) text.reset();
  });
  if (comm::numbers_of_rank_0(world, {text ? 1 : 0})[0] == 0) return {};
  std::istringstream lines(comm::text_of_rank_0(world, text.value_or("")));
  std::string name;
  uint64_t hash = 0;
  Rewind kept;
  data::Skip range;
  lines >> name >> hash >> kept.num_rewinds;
  bool is_good = lines && kept.num_rewinds > 0;
  while (is_good && lines >> range.begin) {
    is_good = static_cast<bool>(lines >> range.end);
    kept.left_out.push_back(range);
  }
  TS_CHECK_IO(is_good && lines.eof(), file_of(folder),
              ": must be what a run wrote when it went back from a spike. To "
              "remove it has the run see again what it left out then.");
  require_ranges(kept.left_out, file_of(folder));
  return kept;
}

// -1: none. Collective.
int64_t newest_commit(const RunFolder& folder, comm::Group& world) {
  int64_t newest = -1;
  comm::on_first(world, "listing " + folder.checkpoints(), [&] {
    newest = checkpoint::newest_commit(folder.checkpoints());
  });
  return comm::numbers_of_rank_0(world, {newest})[0];
}

}  // namespace

Rewind find_rewind(const engine::RunConfig& config, const RunFolder& folder,
                   const data::Sampler& sampler, const SpikePlace& spike,
                   comm::Group& world) {
  const int64_t max_rewinds = config.spike.max_rewinds;
  TS_CHECK(spike.so_far.num_rewinds < max_rewinds, "the spike at step ",
           spike.step, " comes after the run has gone back ",
           spike.so_far.num_rewinds,
           " times, which is all that spike.max_rewinds allows. It may not be "
           "batches that make it: go on from an earlier checkpoint (--resume "
           "PATH) with a lower optimizer.lr or a smaller optimizer.clip_norm, "
           "or set spike.max_rewinds higher.");
  const Source source = find_source(config, folder, spike, world);
  const int64_t step = spike.step - 1;  // the sampler counts from 0
  const int64_t first = std::max(
      source.samples, sampler.taken_before(step - config.spike.skip_before));
  const int64_t behind =
      sampler.taken_before(step + config.spike.skip_after + 1);
  const data::Skip out = {.begin = sampler.position_of(first),
                          .end = sampler.position_of(behind - 1) + 1};
  Rewind next = spike.so_far;
  next.resume = source.resume;
  ++next.num_rewinds;
  next.left_out = data::joined(std::move(next.left_out), {out});
  if (world.rank() != 0) return next;
  const bool is_even = sampler.taken_before(0) == 0;
  log::warning("going back to ", source.name, ", and on without ",
               data::text_of(out, is_even ? config.batch.global : 0),
               " of data.train: ", next.num_rewinds, " of ", max_rewinds,
               " times (spike.max_rewinds)");
  if (!source.checkpoint.empty()) {
    const std::string complaint = comm::complaint_of([&] {
      if (next.resume != "auto") forget_memory(folder);
      keep(folder, source.checkpoint, next);
    });
    if (!complaint.empty()) log::warning(complaint);
  }
  return next;
}

void add_rewinds(Rewind& so_far, const Resumed& found, const RunFolder& folder,
                 int64_t global_batch, comm::Group& world) {
  const SavedRun& saved = found.run;
  bool is_own = is_of_own_folder(so_far, folder);
  is_own = comm::numbers_of_rank_0(world, {is_own})[0] != 0;
  const auto add = [&](const Rewind& more) {
    so_far.num_rewinds = std::max(so_far.num_rewinds, more.num_rewinds);
    so_far.left_out = data::joined(so_far.left_out, more.left_out);
  };
  add({.num_rewinds = is_own ? saved.num_rewinds : 0,
       .left_out = saved.left_out});
  if (is_own) add(kept_rewind(folder, found, world));
  so_far.line_base = is_own ? saved.line_base : newest_commit(folder, world);
  if (world.rank() != 0 || so_far.left_out.empty()) return;
  log::info("left out, by spikes: ",
            left_out_text(so_far.left_out, saved, global_batch));
}

}  // namespace tessera::train
