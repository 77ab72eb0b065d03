#include <ATen/Functions.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <set>
#include <stop_token>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/detail/posix_file.h"
#include "tessera/checkpoint/detail/step_folders.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/agree.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using comm::complaint_of;
using tessera::detail::Json;

TensorSpec part_of(const TensorEntry& entry) {
  return {entry.name, entry.local.scalar_type(), entry.box.size};
}

// An empty part of a tensor is nothing to write, but a tensor without elements
// is still a tensor.
bool is_written(const TensorEntry& entry) {
  return entry.owned &&
         (!entry.box.empty() || entry.box.size == entry.global_shape);
}

int64_t bytes_written(const State& state) {
  int64_t sum = 0;
  for (const TensorEntry& entry : state.tensors) {
    if (is_written(entry)) sum += part_of(entry).bytes();
  }
  return sum;
}

void check_entries(const State& state) {
  std::set<std::string_view> names;
  for (const TensorEntry& entry : state.tensors) {
    TORCH_INTERNAL_ASSERT(names.insert(entry.name).second, "two entries ",
                          entry.name);
    TORCH_INTERNAL_ASSERT(
        entry.local.sizes() == entry.box.size &&
            entry.box.size.size() == entry.global_shape.size(),
        "entry ", entry.name, " of ", entry.local.sizes(), " is not its box");
  }
}

// What PyTorch's reader asks of a file: where each part lies in its tensor.
Metadata dcp_metadata(const std::vector<const TensorEntry*>& entries) {
  std::string info = "{";
  for (const TensorEntry* entry : entries) {
    if (info.size() > 1) info += ',';
    info += Json(entry->name).dump() +
            ":{\"saved_offsets\":" + Json(entry->box.offset).dump() + "}";
  }
  return {{"format", "pt"},
          {"DCP_VERSION", "1.0"},
          {"DCP_SHARDING_INFO", info + "}"}};
}

// The same state, of which what this rank writes changes no longer.
State copy_of(const State& state) {
  State copy = state;
  for (TensorEntry& entry : copy.tensors) {
    if (is_written(entry)) entry.local = begin_to_host(entry.local);
  }
  for (const TensorEntry& entry : state.tensors) {
    wait_for_device(entry.local.device());
  }
  return copy;
}

// Writes this rank's file. Returns a manifest of it alone.
Manifest write_part(const std::string& folder, const State& state, int64_t rank,
                    const std::stop_token& stop) {
  std::map<std::string, const TensorEntry*> by_name;
  std::vector<const TensorEntry*> entries;
  std::vector<TensorSpec> specs;
  for (const TensorEntry& entry : state.tensors) {
    if (!is_written(entry)) continue;
    by_name[entry.name] = &entry;
    entries.push_back(&entry);
    specs.push_back(part_of(entry));
  }
  Manifest part;
  if (entries.empty()) return part;
  FileSums sums = write_safetensors(
      folder + "/" + shard_name(rank), specs, dcp_metadata(entries),
      [&](const std::string& name) {
        TS_CHECK_IO(!stop.stop_requested(), folder, ": it was given up");
        return by_name.at(name)->local;
      });

  for (const auto& [name, entry] : by_name) {
    part.tensors.push_back(
        {name, entry->local.scalar_type(), entry->global_shape});
  }
  SavedFile file{shard_name(rank),   sums.bytes, sums.header_bytes,
                 sums.header_crc32c, sums.hash,  {}};
  for (TensorSums& tensor : sums.tensors) {
    const auto found = by_name.find(tensor.name);
    const auto index =
        static_cast<size_t>(std::distance(by_name.begin(), found));
    file.boxes.push_back({index, found->second->box, std::move(tensor)});
  }
  part.files.push_back(std::move(file));
  return part;
}

// The manifest of all ranks' parts, without step and the like.
Manifest merge(const std::vector<std::string>& parts,
               const std::string& source) {
  std::map<std::string, TensorSpec> tensors;
  Manifest whole;
  for (const std::string& text : parts) {
    const Manifest part = parse_manifest(text, source);
    for (const TensorSpec& tensor : part.tensors) {
      const auto [known, fresh] = tensors.emplace(tensor.name, tensor);
      TS_CHECK_IO(fresh || known->second == tensor, source, ": tensor \"",
                  tensor.name, "\" is ", describe(tensor), " on one rank and ",
                  describe(known->second), " on another");
    }
    std::ranges::copy(part.files, std::back_inserter(whole.files));
  }
  for (const auto& [name, tensor] : tensors) whole.tensors.push_back(tensor);
  for (SavedFile& file : whole.files) {
    for (SavedBox& box : file.boxes) {
      box.tensor = static_cast<size_t>(
          std::distance(tensors.begin(), tensors.find(box.sums.name)));
    }
  }
  return whole;
}

void write_manifest(const std::string& folder, const Manifest& manifest) {
  const std::string text = format_manifest(manifest);
  detail::NewFile file(folder + "/" + kManifestName);
  file.write(text.data(), text.size());
  file.close();
  sync_path(folder);
}

// Nobody may hold a tensor that nobody saved.
void check_listed(const std::string& folder, const State& state) {
  const Manifest manifest = read_manifest(folder);
  for (const TensorEntry& entry : state.tensors) {
    const TensorSpec here{entry.name, entry.local.scalar_type(),
                          entry.global_shape};
    const TensorSpec* saved = manifest.find(entry.name);
    TS_CHECK_IO(saved != nullptr, folder, ": tensor \"", entry.name,
                "\" is owned by no rank");
    TS_CHECK_IO(*saved == here, folder, ": tensor \"", entry.name, "\" is ",
                describe(*saved), " on its owner, ", describe(here), " here");
  }
}

void prepare(const std::string& folder, const std::string& temporary,
             int64_t bytes) {
  fs::create_directories(folder);
  detail::remove_leftovers(folder);
  const uint64_t room = free_bytes(folder);
  TS_CHECK_IO(static_cast<uint64_t>(bytes) <= room, folder, ": has ",
              bytes_text(room), " free, and the checkpoint needs ",
              bytes_text(bytes), ": ", detail::describe_errno(ENOSPC));
  fs::create_directory(temporary);
}

// The step that the file names, where it is there.
std::optional<int64_t> best_of(const std::string& file) {
  if (!fs::exists(file)) return std::nullopt;
  std::string name = read_file(file);
  while (name.ends_with('\n')) name.pop_back();
  return detail::step_of_name(name);
}

// What is left to do once the checkpoint stands: failing does not undo it.
void tidy(const std::string& folder, int64_t step, const SaveOptions& options) {
  write_file_atomic(folder + "/latest", detail::step_name(step) + "\n");
  const std::string best_file = folder + "/best";
  if (!options.best) {
    fs::remove(best_file);
  } else if (fs::exists(folder + "/" + detail::step_name(*options.best))) {
    write_file_atomic(best_file, detail::step_name(*options.best) + "\n");
  }  // else it could not be saved: the one before it is there still
  if (options.keep == 0) return;
  const auto best = best_of(best_file);
  int64_t good = 0;
  for (const auto& found : list_checkpoints(folder)) {
    if (!found.complaint.empty()) continue;
    if (++good > options.keep && found.step != best) {
      detail::remove_step(folder, found.step);
    }
  }
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
    check_entries(state);
    at::Tensor bytes = at::full({1}, bytes_written(state), at::kLong);
    world_.all_reduce(bytes).synchronize();
    on_rank_0([&] { prepare(folder_, temporary_, bytes.item<int64_t>()); });
  }

  // This rank's file; without a word to the others.
  Manifest write(const State& state, const std::stop_token& stop = {}) const {
    return write_part(temporary_, state, world_.rank(), stop);
  }

  // From the files of all ranks, of which `written` gives this one's.
  void end(const std::function<Manifest()>& written, const State& state,
           const SaveOptions& options) {
    Manifest part;
    on_every_rank([&] { part = written(); });
    const auto parts = comm::gather_texts(world_, format_manifest(part));
    on_rank_0([&] {
      write_manifest(temporary_, whole(parts, state.extra, options.mesh));
    });
    on_every_rank([&] { check_listed(temporary_, state); });
    on_rank_0([&] { detail::commit_step(folder_, temporary_, step_); });
    on_rank_0([&] {
      const auto complaint =
          complaint_of([&] { tidy(folder_, step_, options); });
      if (!complaint.empty()) log::warning(complaint);
    });
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

  Manifest whole(const std::vector<std::string>& parts,
                 const std::string& extra, const std::string& mesh) {
    Manifest manifest = merge(parts, temporary_);
    manifest.step = step_;
    manifest.world_size = world_.size();
    manifest.extra = extra;
    manifest.mesh = mesh;
    for (const auto& found : list_checkpoints(folder_)) {
      if (!found.complaint.empty()) continue;
      manifest.sequence = found.sequence + 1;
      manifest.parent = found.step;
      break;
    }
    return manifest;
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
                   const CheckpointConfig& config, int64_t others) {
  const int64_t keep = config.keep;
  const int64_t count = (keep == 0 ? 0 : keep + (config.keep_best ? 1 : 0)) + 1;
  int64_t needed = 0;
  TS_CHECK_CONFIG(!__builtin_mul_overflow(checkpoint_bytes, count, &needed),
                  "checkpoint.", "keep=", keep, ": so many checkpoints of ",
                  checkpoint_bytes,
                  " bytes fit on no disk. Use a smaller checkpoint.keep.");
  for (const auto& found : list_checkpoints(folder)) {
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
                  "set checkpoint.every to 0.");
  TS_CHECK_CONFIG(needed <= 0 || static_cast<uint64_t>(needed) <= room,
                  "checkpoint: ", folder, " has ", bytes_text(room), " free",
                  others > 0 ? " beside what zero.offload keeps" : "",
                  ", but checkpoints need ", bytes_text(needed), " (", count,
                  " of ", bytes_text(checkpoint_bytes),
                  keep == 0 ? "" : ": checkpoint.keep and one being written",
                  "). Free some, set checkpoint.dir to another disk, lower "
                  "checkpoint.keep, or set checkpoint.every to 0.");
}

}  // namespace tessera::checkpoint
