#include "tessera/checkpoint/local.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <sstream>
#include <tuple>
#include <utility>

#include "tessera/checkpoint/detail/file_transfers.h"
#include "tessera/checkpoint/detail/host_files.h"
#include "tessera/checkpoint/detail/load_spread.h"
#include "tessera/checkpoint/detail/local_steps.h"
#include "tessera/checkpoint/detail/posix_file.h"
#include "tessera/checkpoint/detail/rank_parts.h"
#include "tessera/checkpoint/detail/step_folders.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/agree.h"
#include "tessera/comm/host_map.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/host.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using comm::HostMap;
using detail::Base;
using detail::FileTransfer;
using detail::LocalStep;

constexpr size_t kMaxNamesListed = 5;

// A checkpoint that hosts have, whose manifest one rank reads for all.
struct Candidate {
  int64_t step = 0;
  uint64_t manifest_hash = 0;
  int64_t reader = 0;
};

// Newest first, each once.
std::vector<Candidate> sorted(std::vector<Candidate> all) {
  std::ranges::sort(all, {}, [](const Candidate& of) {
    return std::tuple(-of.step, of.manifest_hash, of.reader);
  });
  const auto same = std::ranges::unique(all, {}, [](const Candidate& of) {
    return std::pair(of.step, of.manifest_hash);
  });
  all.erase(same.begin(), same.end());
  return all;
}

// The rank that has a copy of that one's file; itself where there is one host.
int64_t copy_rank_of(int64_t rank, const HostMap& map) {
  const auto [host, local] = map.place_of(rank);
  const auto& next = map.members[(host + 1) % map.num_hosts()];
  return next[local % std::ssize(next)];
}

}  // namespace

struct LocalCheckpoints::Impl {
  Impl(LocalPlace of, comm::Group& ranks, const std::vector<std::string>& hosts)
      : place(std::move(of)),
        world(ranks),
        map(comm::make_host_map(hosts, ranks.rank())) {}

  const LocalPlace place;
  comm::Group& world;
  const HostMap map;
  std::string id, folder;
  bool is_named = false;           // the run's folder says the id
  std::unique_ptr<FileLock> lock;  // on the folder, of who leads its host
  std::optional<Base> base;        // of rank 0; none: to be read anew

  // One rank of a host does what is done once there.
  bool leads_host() const { return map.local == 0; }
  bool leads() const { return world.rank() == 0; }
  std::string step_folder(int64_t step) const {
    return folder + "/" + detail::step_name(step);
  }

  template <typename Work>
  std::string agree(const std::string& doing, const Work& work) {
    return comm::first_complaint_of(world, "local checkpoints: " + doing, work);
  }
  template <typename Work>
  void agree_or_throw(const std::string& doing, const Work& work) {
    const std::string complaint = agree(doing, work);
    TS_CHECK_IO(complaint.empty(), "checkpoint.local_dir: ", complaint);
  }

  void open();
  void refuse_shared_folder();
  void take_folder();
  std::string name();
  std::string unname(const std::string& kept);

  void save(int64_t step, const State& state, const std::string& mesh);
  std::string try_to_save(int64_t step, const State& state,
                          const std::string& mesh);
  void make_room(int64_t step, const at::Tensor& bytes);
  const Base& newest_elsewhere();
  std::string copy_to_next_host(const std::string& to,
                                const Manifest& manifest);

  std::vector<Candidate> candidates();
  std::string load(const Candidate& candidate, State& state);
};

void LocalCheckpoints::Impl::open() {
  detail::LocalId named;
  agree_or_throw("reading " + place.checkpoints, [&] {
    if (leads()) named = detail::read_local_id(place.checkpoints);
  });
  id = comm::text_of_rank_0(world, named.id);
  is_named = !id.empty();
  if (!is_named) id = comm::text_of_rank_0(world, detail::new_local_id());
  folder = detail::folder_of_id(place.local_dir, id);
  agree_or_throw("looking into " + folder, [&] {
    if (!leads_host()) return;
    if (local_checkpoint_folder(place) == folder) take_folder();
  });
  if (named.is_copied) {
    log::warning(place.checkpoints,
                 " is a copy of another run's folder, whose checkpoints in the "
                 "memory of hosts are not used.");
  }
  if (is_named && leads() && named.local_dir != place.local_dir) {
    log::warning("checkpoint.local_dir was ", named.local_dir, " and is ",
                 place.local_dir,
                 " now: ", detail::folder_of_id(named.local_dir, id),
                 " on each host is not used. To remove it gives its memory "
                 "back.");
  }
}

// Each host writes a file: where there are two, it is the folder of both.
void LocalCheckpoints::Impl::refuse_shared_folder() {
  const std::string prefix = folder + ".host-";
  const auto all = [&] {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(place.local_dir)) {
      if (entry.path().string().starts_with(prefix)) {
        files.push_back(entry.path());
      }
    }
    return files;
  };
  const auto remove_all = [&] {
    if (!leads_host()) return;
    fs::create_directories(place.local_dir);
    for (const auto& file : all()) fs::remove(file);
  };
  const std::string doing = "looking into " + place.local_dir;
  agree_or_throw(doing, remove_all);
  agree_or_throw(doing, [&] {
    if (!leads_host()) return;
    write_file_atomic(prefix + std::to_string(map.host), host_name() + "\n");
  });
  bool is_shared = false;
  agree_or_throw(doing, [&] { is_shared = all().size() > 1; });
  agree_or_throw(doing, remove_all);
  std::string complaint;
  if (is_shared) {
    complaint = c10::str(
        "checkpoint.local_dir: ", place.local_dir, " on ", host_name(),
        " is the same folder as on another host, but each keeps files of its "
        "own there. Set it to a folder of each host's own memory or disk, or "
        "checkpoint.local_every to 0.");
  }
  complaint = comm::first_complaint(world, complaint);
  TS_CHECK_CONFIG(complaint.empty(), complaint);
}

void LocalCheckpoints::Impl::take_folder() {
  detail::take_folder(place, folder);
  if (lock) return;
  try {  // against a run of the same path, in another container
    lock = std::make_unique<FileLock>(folder, "");
  } catch (const Error& error) {  // a rank of a start before still ends
    log::debug(message_of(error));
  }
}

// From now on the run goes on from this line alone. "" or why not, the same on
// every rank.
std::string LocalCheckpoints::Impl::name() {
  if (is_named) return "";
  const std::string complaint = agree("naming " + folder, [&] {
    if (leads()) detail::write_local_id(place, id);
  });
  if (!complaint.empty()) return complaint;
  is_named = true;
  return agree("leaving other lines", [&] {
    if (leads_host()) detail::remove_other_folders(place, folder);
  });
}

// No checkpoint in memory is the run's: first their name goes, then the folders
// but `kept`. "" or why not, the same on every rank.
std::string LocalCheckpoints::Impl::unname(const std::string& kept) {
  is_named = false;
  const std::string complaint = agree("leaving them", [&] {
    if (leads()) detail::remove_local_id(place.checkpoints);
  });
  if (!complaint.empty()) return complaint;
  return agree("removing them", [&] {
    if (leads_host()) detail::remove_other_folders(place, kept);
  });
}

// `bytes`: of each rank's file. For those of this host and those that come.
void LocalCheckpoints::Impl::make_room(int64_t step, const at::Tensor& bytes) {
  int64_t needed = 0;
  for (int64_t rank = 0; rank < world.size(); ++rank) {
    const int64_t of_rank = bytes.const_data_ptr<int64_t>()[rank];
    const int64_t copy = copy_rank_of(rank, map);
    if (map.place_of(rank).host == map.host) needed += of_rank;
    if (copy != rank && map.place_of(copy).host == map.host) needed += of_rank;
  }
  take_folder();
  const std::string to = step_folder(step);
  fs::remove(to + "/" + kManifestName);
  detail::remove_unfinished(folder);
  if (std::cmp_less(free_bytes(folder), needed)) {
    detail::remove_other_folders(place, folder);
  }
  detail::require_room(folder, needed);
  fs::create_directory(to);
}

const Base& LocalCheckpoints::Impl::newest_elsewhere() {
  if (!base) base = detail::base_in(place.checkpoints);
  return *base;
}

std::string LocalCheckpoints::Impl::copy_to_next_host(
    const std::string& to, const Manifest& manifest) {
  if (map.num_hosts() == 1) return "";
  std::map<std::string_view, const SavedFile*> by_name;
  for (const SavedFile& file : manifest.files) by_name[file.name] = &file;
  std::vector<FileTransfer> copies;
  for (int64_t rank = 0; rank < world.size(); ++rank) {
    const auto found = by_name.find(shard_name(rank));
    if (found == by_name.end()) continue;  // it owns nothing
    copies.push_back({.name = found->second->name,
                      .bytes = found->second->bytes,
                      .hash = found->second->hash,
                      .sender = rank,
                      .receiver = copy_rank_of(rank, map)});
  }
  return detail::transfer_files(world, to, copies);
}

// "" when it stands on every host; else why not, the same on every rank.
std::string LocalCheckpoints::Impl::try_to_save(int64_t step,
                                                const State& state,
                                                const std::string& mesh) {
  const std::string doing = c10::str("saving step ", step);
  const std::string to = step_folder(step);
  detail::check_entries(state);
  at::Tensor bytes = at::empty({world.size()}, at::kLong);
  const auto own = at::full({1}, detail::bytes_written(state), at::kLong);
  world.all_gather(bytes, own).synchronize();

  std::string complaint = agree(doing, [&] {
    if (leads_host()) make_room(step, bytes);
  });
  const auto next = [&](const auto& work) {
    if (complaint.empty()) complaint = agree(doing, work);
  };
  Manifest part, manifest;
  std::string text;
  next([&] {
    part = detail::write_part(
        to, state, world.rank(),
        [](const TensorEntry& entry) { return entry.local; });
  });
  const auto parts = comm::gather_texts(world, format_manifest(part));
  next([&] {
    if (!leads()) return;
    text = format_manifest(detail::manifest_of(
        parts, newest_elsewhere(),
        {.step = step, .mesh = mesh, .extra = state.extra}, to));
  });
  text = comm::text_of_rank_0(world, text);
  next([&] {
    manifest = parse_manifest(text, to);
    check_coverage(manifest, to);
    detail::check_listed(manifest, to, state);
  });
  if (complaint.empty()) complaint = copy_to_next_host(to, manifest);
  next([&] {
    if (leads_host()) write_file_atomic(to + "/" + kManifestName, text);
  });
  return complaint;
}

void LocalCheckpoints::Impl::save(int64_t step, const State& state,
                                  const std::string& mesh) {
  std::string complaint = try_to_save(step, state, mesh);
  if (complaint.empty()) complaint = name();
  if (complaint.empty()) {
    agree_or_throw("removing what is older", [&] {
      if (leads_host()) detail::remove_other_steps(folder, step);
    });
    return;
  }
  agree("giving up", [&] {
    if (leads_host()) fs::remove_all(step_folder(step));
  });
  TS_CHECK_IO(false, "checkpoint: step ", step, " was not saved in ",
              "checkpoint.local_dir: ", complaint,
              ". The one before it is untouched.");
}

std::vector<Candidate> LocalCheckpoints::Impl::candidates() {
  std::string lines;
  agree_or_throw("listing " + folder, [&] {
    if (!leads_host()) return;
    for (const LocalStep& found : detail::local_steps(folder)) {
      lines += c10::str(found.step, " ", found.base_step.value_or(-1), " ",
                        found.base_sequence, " ", found.manifest_hash, "\n");
    }
  });
  const auto of_ranks = comm::gather_texts(world, lines);
  std::vector<Candidate> newer;
  agree_or_throw("reading " + place.checkpoints, [&] {
    if (!leads()) return;
    const Base& there = newest_elsewhere();
    for (int64_t rank = 0; rank < std::ssize(of_ranks); ++rank) {
      std::istringstream each(of_ranks[rank]);
      LocalStep found;
      int64_t base_step = -1;
      while (each >> found.step >> base_step >> found.base_sequence >>
             found.manifest_hash) {
        found.base_step =
            base_step < 0 ? std::nullopt : std::optional(base_step);
        if (detail::is_newer(found, there)) {
          newer.push_back({found.step, found.manifest_hash, rank});
        }
      }
    }
  });
  std::vector<int64_t> numbers;
  for (const Candidate& each : sorted(std::move(newer))) {
    numbers.insert(numbers.end(), {each.step, each.reader});
  }
  numbers = comm::numbers_of_rank_0(world, numbers);
  std::vector<Candidate> all;
  for (size_t i = 0; i + 1 < numbers.size(); i += 2) {
    all.push_back({.step = numbers[i], .reader = numbers[i + 1]});
  }
  return all;
}

std::string LocalCheckpoints::Impl::load(const Candidate& candidate,
                                         State& state) {
  const std::string from = step_folder(candidate.step);
  const std::string manifest_path = from + "/" + kManifestName;
  std::string text;
  std::string complaint = agree("reading " + from, [&] {
    if (world.rank() == candidate.reader) text = read_file(manifest_path);
  });
  if (!complaint.empty()) return complaint;
  text = comm::text_of(world, candidate.reader, text);
  detail::SpreadFiles files;
  bool is_here = false;
  complaint = agree("reading " + from, [&] {
    files.manifest = parse_manifest(text, from);
    is_here = fs::exists(manifest_path) && read_file(manifest_path) == text;
  });
  if (!complaint.empty()) return complaint;

  detail::HostFiles on_hosts(world, map, from, files.manifest);
  on_hosts.verify(is_here);
  const auto missing = on_hosts.missing();
  if (!missing.empty()) {
    return "no host has " + some_of(missing, kMaxNamesListed) + " whole";
  }
  complaint = agree("making " + from, [&] {
    if (!leads_host()) return;
    take_folder();
    if (is_here) return;
    fs::remove_all(from);
    fs::create_directory(from);
    write_file_atomic(manifest_path, text);
  });
  if (!complaint.empty()) return complaint;
  files.fetch = [&](const std::vector<bool>& needed) {
    return on_hosts.fetch(needed);
  };
  return detail::load_spread(from, state, world, files);
}

LocalCheckpoints::LocalCheckpoints(const LocalPlace& place, comm::Group& world,
                                   const std::vector<std::string>& hosts)
    : impl_(new Impl(place, world, hosts)) {
  impl_->open();
  impl_->refuse_shared_folder();
}

LocalCheckpoints::~LocalCheckpoints() = default;

const std::string& LocalCheckpoints::folder() const { return impl_->folder; }

void LocalCheckpoints::save(int64_t step, const State& state,
                            const std::string& mesh) {
  impl_->save(step, state, mesh);
}

std::optional<int64_t> LocalCheckpoints::load_newest(State& state) {
  if (!impl_->is_named) return std::nullopt;
  for (const Candidate& candidate : impl_->candidates()) {
    const std::string complaint = impl_->load(candidate, state);
    if (complaint.empty()) return candidate.step;
    if (impl_->leads()) {
      log::warning("checkpoint: step ", candidate.step, " in ", impl_->folder,
                   " is not used: ", complaint);
    }
  }
  return std::nullopt;
}

void LocalCheckpoints::leave_other_lines() {
  if (impl_->is_named) return;
  const std::string complaint = impl_->unname(impl_->folder);
  TS_CHECK_IO(complaint.empty(), "checkpoint.local_dir: ", complaint);
}

void LocalCheckpoints::base_changed() { impl_->base.reset(); }

void LocalCheckpoints::begin_anew() {
  Impl& impl = *impl_;
  impl.is_named = false;
  impl.id = comm::text_of_rank_0(impl.world, detail::new_local_id());
  impl.folder = detail::folder_of_id(impl.place.local_dir, impl.id);
  impl.lock.reset();
}

void LocalCheckpoints::remove() {
  impl_->lock.reset();
  const std::string complaint = impl_->unname("");
  if (complaint.empty() || !impl_->leads()) return;
  log::warning("checkpoint.local_dir: what is left there holds memory: ",
               complaint, ". Remove it by hand.");
}

}  // namespace tessera::checkpoint
