#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/detail/load_spread.h"
#include "tessera/checkpoint/detail/step_folders.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/agree.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/crc32c.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/mesh/slice.h"

namespace tessera::checkpoint {
namespace {

using comm::first_complaint;
using comm::first_complaint_of;

constexpr size_t kMaxNamesListed = 20;

// What the entry is called in this checkpoint: its own name, or those of its
// slices, where it has the first of them, or that of what is finer.
struct Names {
  std::vector<std::string> all;
  bool are_slices = false;
};

bool is_narrower(at::ScalarType one, at::ScalarType other) {
  return c10::isReducedFloatingType(one) && at::isFloatingType(other) &&
         !c10::isReducedFloatingType(other);
}

Names names_in(const Manifest& manifest, const TensorEntry& entry) {
  if (!entry.slices.empty() && manifest.find(entry.slices[0]) != nullptr) {
    return {entry.slices, true};
  }
  const TensorSpec* saved = manifest.find(entry.name);
  const bool is_finer = saved != nullptr && !entry.finer.empty() &&
                        is_narrower(saved->dtype, entry.local.scalar_type()) &&
                        manifest.find(entry.finer) != nullptr;
  return {{is_finer ? entry.finer : entry.name}};
}

// What of this rank's state is not in the checkpoint as it is here.
std::string compare(const Manifest& manifest, const State& state,
                    bool convert) {
  std::vector<std::string> missing;
  std::vector<std::string> different;
  for (const TensorEntry& entry : state.tensors) {
    const Names names = names_in(manifest, entry);
    for (const std::string& name : names.all) {
      TensorSpec here{name, entry.local.scalar_type(), entry.global_shape};
      if (names.are_slices) here.shape.erase(here.shape.begin());
      const TensorSpec* saved = manifest.find(name);
      if (convert && saved != nullptr) here.dtype = saved->dtype;
      if (saved == nullptr) {
        missing.push_back(name);
      } else if (*saved != here) {
        different.push_back(name + " (" + describe(*saved) + " saved, " +
                            describe(here) + " here)");
      }
    }
  }
  std::string text;
  if (!missing.empty()) {
    text += "\n  not in the checkpoint: " + some_of(missing, kMaxNamesListed);
  }
  if (!different.empty())
    text += "\n  different: " + some_of(different, kMaxNamesListed);
  return text;
}

// What of the checkpoint no rank asks for. The same on every rank.
std::string unused(const Manifest& manifest, const State& state,
                   comm::Group& world) {
  at::Tensor used = at::zeros({std::ssize(manifest.tensors)}, at::kLong);
  const auto use = [&](const std::string& name) {
    const TensorSpec* saved = manifest.find(name);
    if (saved == nullptr) return;
    used.data_ptr<int64_t>()[saved - manifest.tensors.data()] = 1;
  };
  for (const TensorEntry& entry : state.tensors) {
    use(entry.name);
    std::ranges::for_each(names_in(manifest, entry).all, use);
  }
  world.all_reduce(used, comm::ReduceOp::kMax).synchronize();
  std::vector<std::string> names;
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    if (used.const_data_ptr<int64_t>()[i] == 0) {
      names.push_back(manifest.tensors[i].name);
    }
  }
  return names.empty()
             ? ""
             : "\n  not in the model: " + some_of(names, kMaxNamesListed);
}

using OpenFiles = std::map<size_t, SafetensorsFile>;  // of a manifest

// One checkpoint folder, read by every rank.
class Load {
 public:
  Load(const std::string& folder, State& state, comm::Group& world)
      : folder_(folder), state_(state), world_(world) {}

  // "" when the state was filled; else what is wrong with the checkpoint, the
  // same on every rank. Throws where it is of another model.
  std::string run(const LoadOptions& options) { return filled(check(options)); }

  // The same, of files that are fetched first.
  std::string run_spread(const detail::SpreadFiles& files) {
    manifest_ = files.manifest;
    return filled(match({}, [&] { return files.fetch(needed()); }));
  }

  // The same, and nothing is filled.
  std::string check(const LoadOptions& options) {
    std::string complaint = agree([&] { manifest_ = read_manifest(folder_); });
    if (complaint.empty()) complaint = compare_manifests();
    if (!complaint.empty()) return complaint;
    return match(options, [&] {
      return agree([&] {
        verify();
        open();
        require_the_same();
      });
    });
  }

  // A box of the state's tensor of that index, into `target`; `verifies`: long
  // after the check. REQUIRES: checked.
  void read(size_t index, const mesh::Box& box, const at::Tensor& target,
            bool verifies) const {
    const at::NoGradGuard no_grad;
    for (const Part& part : parts_[index]) {
      const mesh::Box common = mesh::intersect(part.place, box);
      if (common.empty()) continue;
      const SafetensorsFile& file = open_.at(part.file);
      mesh::Box source = mesh::relative(common, part.place);
      if (part.is_slice) {
        source.offset.erase(source.offset.begin());
        source.size.erase(source.size.begin());
      }
      if (verifies) verify_rows(file, *part.saved, source);
      const auto here = mesh::slice(target, mesh::relative(common, box));
      here.copy_(
          file.read_box(part.saved->sums.name, source).view(here.sizes()));
    }
  }

  void let_go(size_t index) const {
    for (const Part& part : parts_[index]) open_.at(part.file).let_go();
  }

  int64_t step() const { return manifest_.step; }

 private:
  struct Part {
    size_t file = 0;
    const SavedBox* saved = nullptr;
    bool is_slice = false;  // without dim 0 of ours
    mesh::Box place;        // of the saved box in our tensor
  };

  std::string path_of(size_t file) const {
    return folder_ + "/" + manifest_.files[file].name;
  }

  template <typename Work>
  std::string agree(const Work& work) {
    return first_complaint_of(world_, "checkpoint: reading " + folder_, work);
  }

  // `make_sure`: that the files which this rank reads are there, and good.
  std::string match(const LoadOptions& options,
                    const std::function<std::string()>& make_sure) {
    if (options.told) tell(options.told);
    std::string complaint = agree([&] { find_parts(); });
    if (!complaint.empty()) return complaint;
    refuse_other_models(options);
    return make_sure();
  }

  // Unless something is wrong with the checkpoint.
  std::string filled(const std::string& complaint) {
    if (!complaint.empty()) return complaint;
    const std::string failure = agree([&] {
      open();
      fill();
    });
    TS_CHECK_IO(failure.empty(), folder_,
                ": reading failed half-way: ", failure);
    state_.extra = manifest_.extra;
    return "";
  }

  void tell(const Told& told) {
    const std::string complaint =
        agree([&] { told(folder_, manifest_.extra, state_); });
    TS_CHECK_CONFIG(complaint.empty(), complaint);
  }

  void find_parts() {
    std::map<std::string_view, std::vector<Part>> saved;
    for (size_t file = 0; file < manifest_.files.size(); ++file) {
      for (const SavedBox& box : manifest_.files[file].boxes) {
        saved[box.sums.name].push_back({.file = file, .saved = &box});
      }
    }
    parts_.assign(state_.tensors.size(), {});
    for (size_t i = 0; i < state_.tensors.size(); ++i) {
      const TensorEntry& entry = state_.tensors[i];
      const Names names = names_in(manifest_, entry);
      for (size_t slice = 0; slice < names.all.size(); ++slice) {
        const auto found = saved.find(names.all[slice]);
        if (found == saved.end()) continue;  // refused later, by name
        for (Part part : found->second) {
          part.place = part.saved->box;
          part.is_slice = names.are_slices;
          if (part.is_slice) stack(part.place, static_cast<int64_t>(slice));
          // Boxes of another model's shape are refused later, by name.
          if (part.place.size.size() != entry.box.size.size()) continue;
          if (!mesh::intersect(part.place, entry.box).empty()) {
            parts_[i].push_back(part);
          }
        }
      }
    }
  }

  // The box of a slice, in the tensor of which it is number `index`.
  static void stack(mesh::Box& box, int64_t index) {
    box.offset.insert(box.offset.begin(), index);
    box.size.insert(box.size.begin(), 1);
  }

  // Ranks of several hosts might see several folders of this name.
  std::string compare_manifests() {
    const auto seal =
        static_cast<int64_t>(hash64(format_manifest(manifest_)) >> 1);
    at::Tensor extremes = at::tensor({seal, -seal}, at::kLong);
    world_.all_reduce(extremes, comm::ReduceOp::kMax).synchronize();
    const auto* values = extremes.const_data_ptr<int64_t>();
    return values[0] == -values[1]
               ? ""
               : folder_ + "/" + kManifestName +
                     ": ranks read different contents. Is the folder the same "
                     "on every host, and was the same checkpoint given to "
                     "every rank?";
  }

  void refuse_other_models(const LoadOptions& options) {
    std::string difference =
        first_complaint(world_, compare(manifest_, state_, options.convert));
    if (!options.partial) difference += unused(manifest_, state_, world_);
    TS_CHECK_CONFIG(
        difference.empty(), folder_,
        ": is a checkpoint of another model:", difference,
        difference.find("optimizer.") == std::string::npos
            ? ""
            : "\nOf names that begin with optimizer., optimizer.type, "
              "optimizer.ema, optimizer.momentum and precision.compute decide.",
        difference.find("delayed.") == std::string::npos
            ? ""
            : "\nOf names that begin with delayed., pipeline.schedule decides.",
        "\nUse the configuration that it was saved with, or give the "
        "run another name.");
  }

  // The files that this rank reads.
  std::vector<bool> needed() const {
    std::vector<bool> needed(manifest_.files.size(), false);
    for (const auto& parts : parts_) {
      for (const Part& part : parts) needed[part.file] = true;
    }
    return needed;
  }

  // These, and its share of the others.
  void verify() const {
    const std::vector<bool> wanted = needed();
    for (size_t file = 0; file < wanted.size(); ++file) {
      const bool shared =
          static_cast<int64_t>(file) % world_.size() == world_.rank();
      if (wanted[file] || shared) {
        verify_file(folder_, manifest_, manifest_.files[file]);
      }
    }
  }

  // All that this rank reads: they stay what they are, whoever removes them.
  void open() {
    const std::vector<bool> wanted = needed();
    for (size_t file = 0; file < wanted.size(); ++file) {
      if (wanted[file]) open_.try_emplace(file, path_of(file));
    }
  }

  // A run that saves the step again puts another folder in its place: then
  // what was opened may be none of what was verified.
  void require_the_same() const {
    const auto now = read_manifest_alone(folder_);
    TS_CHECK_IO(format_manifest(now) == format_manifest(manifest_), folder_,
                ": it was saved again while it was read. Read it again.");
  }

  void fill() {
    for (size_t i = 0; i < state_.tensors.size(); ++i) {
      const TensorEntry& entry = state_.tensors[i];
      read(i, entry.box, entry.local, /*verifies=*/false);
    }
  }

  // The blocks in which these rows of a saved box lie.
  static void verify_rows(const SafetensorsFile& file, const SavedBox& saved,
                          const mesh::Box& rows) {
    const TensorSums& sums = saved.sums;
    const int64_t bytes = sums.end - sums.begin;
    int64_t first = 0, last = bytes;
    if (!rows.size.empty()) {
      const int64_t row = bytes / saved.box.size[0];
      first = rows.offset[0] * row;
      last = first + rows.size[0] * row;
    }
    for (int64_t block = first / kChecksumBlockBytes;
         block * kChecksumBlockBytes < last; ++block) {
      const int64_t begin = sums.begin + block * kChecksumBlockBytes;
      const int64_t end = std::min(begin + kChecksumBlockBytes, sums.end);
      const auto here = file.bytes().substr(begin, end - begin);
      TS_CHECK_IO(crc32c(std::as_bytes(std::span(here))) == sums.blocks[block],
                  file.path(), ": tensor '", sums.name,
                  "': the checksum differs in bytes ", begin, " to ", end,
                  " of the file, and did not when it was opened: something "
                  "writes to it.");
    }
  }

  const std::string folder_;
  State& state_;
  comm::Group& world_;
  Manifest manifest_;
  std::vector<std::vector<Part>> parts_;  // of each tensor of the state
  OpenFiles open_;
};

void require_usable(const std::string& step_folder,
                    const std::string& complaint) {
  TS_CHECK_IO(complaint.empty(), "checkpoint: ", step_folder,
              " cannot be used: ", complaint);
}

}  // namespace

std::string detail::load_spread(const std::string& folder, State& state,
                                comm::Group& world, const SpreadFiles& files) {
  return Load(folder, state, world).run_spread(files);
}

int64_t load(const std::string& step_folder, State& state, comm::Group& world,
             const LoadOptions& options) {
  Load loading(step_folder, state, world);
  require_usable(step_folder, loading.run(options));
  return loading.step();
}

struct TensorReader::Impl {
  State state;
  std::unique_ptr<comm::Communicator> alone = comm::make_communicator({});
  std::optional<Load> load = {};
  std::map<std::string, size_t> by_name = {};
};

TensorReader::TensorReader(const std::string& step_folder, State wanted,
                           const LoadOptions& options)
    : impl_(std::make_unique<Impl>(Impl{.state = std::move(wanted)})) {
  impl_->load.emplace(step_folder, impl_->state, impl_->alone->world());
  require_usable(step_folder, impl_->load->check(options));
  for (const TensorEntry& entry : impl_->state.tensors) {
    impl_->by_name.emplace(entry.name, impl_->by_name.size());
  }
}

TensorReader::~TensorReader() = default;

at::Tensor TensorReader::read(const std::string& name,
                              const mesh::Box& box) const {
  const size_t index = impl_->by_name.at(name);
  const at::Tensor target =
      at::empty(box.size, impl_->state.tensors[index].local.options());
  impl_->load->read(index, box, target, /*verifies=*/true);
  impl_->load->let_go(index);
  return target;
}

std::string complaint_about(const std::string& step_folder,
                            comm::Group& world) {
  return first_complaint_of(world, "checkpoint: reading " + step_folder, [&] {
    const Manifest manifest = read_manifest(step_folder);
    for (auto file = world.rank(); file < std::ssize(manifest.files);
         file += world.size()) {
      verify_file(step_folder, manifest, manifest.files[file]);
    }
  });
}

std::optional<int64_t> load_latest(const std::string& folder, State& state,
                                   comm::Group& world,
                                   const LoadOptions& options) {
  std::vector<int64_t> steps;
  comm::on_first(world, "checkpoint: listing " + folder, [&] {
    for (const auto& found : list_checkpoints(folder)) {
      steps.push_back(found.step);
    }
  });
  steps = comm::numbers_of_rank_0(world, steps);
  std::string first;
  for (const int64_t step : steps) {
    const std::string path = step_folder(folder, step);
    const std::string complaint = Load(path, state, world).run(options);
    if (complaint.empty()) return step;
    if (first.empty()) first = complaint;
    if (world.rank() == 0) {
      log::warning("checkpoint: ", path, " is not used: ", complaint);
    }
  }
  TS_CHECK_IO(steps.empty(), "checkpoint: none of the ", steps.size(), " in ",
              folder, " can be used. The newest: ", first,
              ". Remove them to start again.");
  return std::nullopt;
}

}  // namespace tessera::checkpoint
