#include "tessera/checkpoint/detail/host_files.h"

#include <ATen/Functions.h>

#include <filesystem>

#include "tessera/checkpoint/detail/file_transfers.h"
#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"

namespace tessera::checkpoint::detail {

FileTable::FileTable(int64_t hosts, int64_t files)
    : set_(at::zeros({hosts, files}, at::kByte)) {}

FileTable::FileTable(const FileTable& of) : set_(of.set_.clone()) {}

void FileTable::set(int64_t host, int64_t file) { set_[host][file].fill_(1); }

bool FileTable::has(int64_t host, int64_t file) const {
  return set_.const_data_ptr<uint8_t>()[host * set_.size(1) + file] != 0;
}

int64_t FileTable::num_hosts_with(int64_t file) const {
  int64_t count = 0;
  for (int64_t host = 0; host < set_.size(0); ++host) {
    count += has(host, file) ? 1 : 0;
  }
  return count;
}

int64_t FileTable::first_host_with(int64_t file, int64_t host) const {
  const int64_t hosts = set_.size(0);
  for (int64_t i = 0; i < hosts; ++i) {
    if (has((host + i) % hosts, file)) return (host + i) % hosts;
  }
  TORCH_INTERNAL_ASSERT(false, "no host has file ", file);
}

void FileTable::unite(comm::Group& world) {
  world.all_reduce(set_, comm::ReduceOp::kMax).synchronize();
}

HostFiles::HostFiles(comm::Group& world, const comm::HostMap& map,
                     const std::string& folder, const Manifest& manifest)
    : world_(world),
      map_(map),
      folder_(folder),
      manifest_(manifest),
      there_(map.num_hosts(), std::ssize(manifest.files)) {}

void HostFiles::verify(bool is_here) {
  const auto verify = [&](int64_t file) {
    if (!std::filesystem::exists(folder_ + "/" + manifest_.files[file].name)) {
      return;
    }
    const std::string complaint = comm::complaint_of(
        [&] { verify_file(folder_, manifest_, manifest_.files[file]); });
    if (complaint.empty()) return there_.set(map_.host, file);
    log::warning("checkpoint: not used: ", complaint);
  };
  const std::string complaint =
      comm::first_complaint_of(world_, "verifying " + folder_, [&] {
        for (int64_t file = map_.local; is_here && file < num_files();
             file += map_.num_locals()) {
          verify(file);
        }
      });
  TS_CHECK_IO(complaint.empty(), complaint);
  there_.unite(world_);
}

std::vector<std::string> HostFiles::missing() const {
  std::vector<std::string> names;
  for (int64_t file = 0; file < num_files(); ++file) {
    if (there_.num_hosts_with(file) > 0) continue;
    names.push_back(manifest_.files[file].name);
  }
  return names;
}

std::string HostFiles::fetch(const std::vector<bool>& needed) {
  FileTable wanted = there_;
  for (int64_t file = 0; file < num_files(); ++file) {
    if (needed[file]) wanted.set(map_.host, file);
  }
  wanted.unite(world_);
  std::vector<FileTransfer> transfers;
  for (int64_t file = 0; file < num_files(); ++file) {
    const SavedFile& saved = manifest_.files[file];
    if (wanted.num_hosts_with(file) == 1) {
      wanted.set((wanted.first_host_with(file) + 1) % map_.num_hosts(), file);
    }
    for (int64_t host = 0; host < map_.num_hosts(); ++host) {
      if (!wanted.has(host, file) || there_.has(host, file)) continue;
      const auto& senders = map_.members[there_.first_host_with(file, host)];
      const auto& receivers = map_.members[host];
      transfers.push_back(
          {.name = saved.name,
           .bytes = saved.bytes,
           .hash = saved.hash,
           .sender = senders[file % std::ssize(senders)],
           .receiver = receivers[file % std::ssize(receivers)]});
    }
  }
  return transfer_files(world_, folder_, transfers);
}

}  // namespace tessera::checkpoint::detail
