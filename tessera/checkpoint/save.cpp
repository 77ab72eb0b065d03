#include <ATen/Functions.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <stop_token>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/detail/local_steps.h"
#include "tessera/checkpoint/detail/posix_file.h"
#include "tessera/checkpoint/detail/rank_parts.h"
#include "tessera/checkpoint/detail/step_folders.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/reading.h"
#include "tessera/comm/agree.h"
#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using comm::complaint_of;

// The same state, of which what this rank writes changes no longer.
State copy_of(const State& state) {
  State copy = state;
  for (TensorEntry& entry : copy.tensors) {
    if (detail::is_written(entry)) entry.local = begin_to_host(entry.local);
  }
  for (const TensorEntry& entry : state.tensors) {
    wait_for_device(entry.local.device());
  }
  return copy;
}

void prepare(const std::string& folder, const std::string& temporary,
             int64_t bytes) {
  TS_CHECK_IO(!fs::exists(folder + "/" + kManifestName), folder,
              " is a checkpoint itself, which nothing is added to. Give the "
              "folder above it.");
  fs::create_directories(folder);
  detail::remove_leftovers(folder);
  detail::require_room(folder, bytes);
  fs::create_directory(temporary);
}

// The step that the file names, where it is there.
std::optional<int64_t> best_of(const std::string& file) {
  if (!fs::exists(file)) return std::nullopt;
  std::string name = read_file(file);
  while (name.ends_with('\n')) name.pop_back();
  return detail::step_of_name(name);
}

void remove_or_leave(const std::string& folder, int64_t step) {
  if (remove_unless_read(folder, step)) return;
  log::debug("checkpoint: step ", step, " is being read, and stays");
}

// What is left to do once the checkpoint stands: failing does not undo it, nor
// keep the rest, which makes room, from being done.
void tidy(const std::string& folder, int64_t step, const SaveOptions& options) {
  const auto attempt = [](const std::function<void()>& work) {
    const std::string complaint = complaint_of(work);
    if (!complaint.empty()) log::warning(complaint);
  };
  const std::string best_file = folder + "/best";
  attempt([&] { detail::name_latest(folder, step); });
  attempt([&] {
    if (!options.best) {
      fs::remove(best_file);
    } else if (fs::exists(step_folder(folder, *options.best))) {
      write_file_atomic(best_file, detail::step_name(*options.best) + "\n");
    }  // else it could not be saved: the one before it is there still
  });
  if (options.keep == 0) return;
  attempt([&] {
    const auto best = best_of(best_file);
    int64_t good = 0;
    for (const auto& found : list_checkpoints(folder)) {
      const bool goes = found.complaint.empty() && ++good > options.keep &&
                        found.step != best && found.step != options.best;
      if (goes) attempt([&] { remove_or_leave(folder, found.step); });
    }
  });
}

// One save: its steps in order, each agreed on by all ranks before the next.
class Save {
 public:
  Save(const std::string& folder, int64_t step, comm::Group& world)
      : folder_(folder),
        temporary_(folder + "/" + detail::step_name(step) + ".tmp"),
        step_(step),
        world_(world) {}

  int64_t step() const { return step_; }

  // There is room, and a folder.
  void begin(const State& state) {
    detail::check_entries(state);
    at::Tensor bytes = at::full({1}, detail::bytes_written(state), at::kLong);
    world_.all_reduce(bytes).synchronize();
    on_rank_0([&] { prepare(folder_, temporary_, bytes.item<int64_t>()); });
  }

  // This rank's file; without a word to the others.
  Manifest write(const State& state, const std::stop_token& stop = {}) const {
    return detail::write_part(
        temporary_, state, world_.rank(), [&](const TensorEntry& entry) {
          TS_CHECK_IO(!stop.stop_requested(), temporary_, ": it was given up");
          return entry.local;
        });
  }

  // From the files of all ranks, of which `written` gives this one's.
  void end(const std::function<Manifest()>& written, const State& state,
           const SaveOptions& options) {
    Manifest part;
    on_every_rank([&] { part = written(); });
    const auto parts = comm::gather_texts(world_, format_manifest(part));
    on_rank_0([&] {
      detail::write_manifest(
          parts, detail::base_in(folder_),
          {.step = step_, .mesh = options.mesh, .extra = state.extra},
          temporary_);
    });
    on_every_rank([&] {
      detail::check_listed(read_manifest(temporary_), temporary_, state);
    });
    on_rank_0([&] { detail::commit_step(folder_, temporary_, step_); });
    on_rank_0([&] { tidy(folder_, step_, options); });
  }

  template <typename Work>
  void on_every_rank(const Work& work) {
    const std::string doing = c10::str("checkpoint: saving step ", step_);
    const std::string complaint = comm::first_complaint_of(world_, doing, work);
    if (complaint.empty()) return;
    comm::first_complaint_of(world_, doing, [&] {
      // What cannot be removed now is removed by the next save.
      if (world_.rank() == 0) detail::remove_leftovers(folder_);
    });
    TS_CHECK_IO(false, "checkpoint: step ", step_,
                " was not saved: ", complaint, ". Earlier checkpoints in ",
                folder_, " are untouched.");
  }

 private:
  template <typename Work>
  void on_rank_0(const Work& work) {
    on_every_rank([&] {
      if (world_.rank() == 0) work();
    });
  }

  const std::string folder_;
  const std::string temporary_;
  const int64_t step_;
  comm::Group& world_;
};

}  // namespace

void save(const std::string& folder, int64_t step, const State& state,
          comm::Group& world, const SaveOptions& options) {
  Save save(folder, step, world);
  save.begin(state);
  save.end([&] { return save.write(state); }, state, options);
}

struct BackgroundSave::Impl {
  Save save;
  SaveOptions options;
  State state = {};
  std::stop_source gives_up = {};
  std::future<Manifest> part = {};  // its end is the thread's

  ~Impl() { gives_up.request_stop(); }
};

BackgroundSave::BackgroundSave(const std::string& folder, int64_t step,
                               const State& state, comm::Group& world,
                               const SaveOptions& options)
    : impl_(new Impl{.save = {folder, step, world}, .options = options}) {
  Impl& impl = *impl_;
  impl.save.begin(state);
  impl.save.on_every_rank([&] { impl.state = copy_of(state); });
  impl.save.on_every_rank([&] {
    impl.part = std::async(std::launch::async, [&impl] {
      return impl.save.write(impl.state, impl.gives_up.get_token());
    });
  });
}

BackgroundSave::~BackgroundSave() = default;

int64_t BackgroundSave::step() const { return impl_->save.step(); }

bool BackgroundSave::is_written() const {
  return impl_->part.wait_for(std::chrono::seconds(0)) ==
         std::future_status::ready;
}

void BackgroundSave::finish() {
  impl_->save.end([this] { return impl_->part.get(); }, impl_->state,
                  impl_->options);
}

void require_space(const std::string& folder, int64_t checkpoint_bytes,
                   const CheckpointConfig& config, int64_t others,
                   int64_t saves) {
  const int64_t keep = config.keep;
  const auto present = list_checkpoints(folder);
  const int64_t best = config.keep_best ? 1 : 0;
  int64_t count = (keep == 0 ? 0 : keep + best) + 1;
  if (saves < count)
    count = std::min(count, saves + std::ssize(present) + best);
  int64_t needed = 0;
  TS_CHECK_CONFIG(!__builtin_mul_overflow(checkpoint_bytes, count, &needed),
                  "checkpoint.", "keep=", keep, ": so many checkpoints of ",
                  checkpoint_bytes,
                  " bytes fit on no disk. Use a smaller checkpoint.keep.");
  for (const auto& found : present) {
    if (keep == 0 || !found.complaint.empty()) continue;
    needed -=
        read_manifest(folder + "/" + detail::step_name(found.step)).bytes();
  }
  // The first save removes them.
  const int64_t leftovers = detail::bytes_of_leftovers(folder);
  needed -= leftovers;
  const uint64_t free = free_bytes(folder);
  const uint64_t room = free - std::min<uint64_t>(free, others);
  const int64_t next = checkpoint_bytes - leftovers;
  TS_CHECK_CONFIG(next <= 0 || static_cast<uint64_t>(next) <= room,
                  "checkpoint: ", folder, " has ", bytes_text(room), " free",
                  others > 0 ? " beside what zero.offload keeps" : "",
                  ", but the next checkpoint needs ", bytes_text(next),
                  " before an older one goes. Free some, remove checkpoints "
                  "that nobody needs, set checkpoint.dir to another disk, or "
                  "save none: checkpoint.every 0, and no "
                  "checkpoint.keep_best.");
  TS_CHECK_CONFIG(needed <= 0 || static_cast<uint64_t>(needed) <= room,
                  "checkpoint: ", folder, " has ", bytes_text(room), " free",
                  others > 0 ? " beside what zero.offload keeps" : "",
                  ", but checkpoints need ", bytes_text(needed), " (", count,
                  " of ", bytes_text(checkpoint_bytes),
                  keep == 0 ? "" : ": checkpoint.keep and one being written",
                  "). Free some, set checkpoint.dir to another disk, lower "
                  "checkpoint.keep, or save none: checkpoint.every 0, and no "
                  "checkpoint.keep_best.");
}

}  // namespace tessera::checkpoint
