// Which hosts have which files of a checkpoint; how each gets what it needs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/group.h"
#include "tessera/comm/host_map.h"

namespace tessera::checkpoint::detail {

// (hosts, files): which host has, or needs, which file of a manifest.
class FileTable {
 public:
  FileTable(int64_t hosts, int64_t files);
  FileTable(const FileTable& of);
  FileTable& operator=(const FileTable&) = delete;

  void set(int64_t host, int64_t file);
  bool has(int64_t host, int64_t file) const;
  int64_t num_hosts_with(int64_t file) const;
  // From `host` on, in the ring. REQUIRES: some host has it.
  int64_t first_host_with(int64_t file, int64_t host = 0) const;
  // What any rank has set. Comm: an all_reduce.
  void unite(comm::Group& world);

 private:
  at::Tensor set_;
};

// Of one checkpoint. `folder`: of this host; `manifest`: the same on every
// rank. Both, and the group and map, outlive it. Comm: collective over `world`.
class HostFiles {
 public:
  HostFiles(comm::Group& world, const comm::HostMap& map,
            const std::string& folder, const Manifest& manifest);

  // Reads every byte of what is in the folder, shared out among the ranks of
  // its host; what is damaged is told, and counts as missing. `is_here`: the
  // folder is of this manifest.
  void verify(bool is_here);
  // The names of those that no host has whole.
  std::vector<std::string> missing() const;
  // Each host gets, once, what its ranks need and it has not; what one host
  // alone has, the next one too. "" or a complaint, the same on every rank.
  std::string fetch(const std::vector<bool>& needed);

 private:
  int64_t num_files() const { return std::ssize(manifest_.files); }

  comm::Group& world_;
  const comm::HostMap& map_;
  const std::string& folder_;
  const Manifest& manifest_;
  FileTable there_;
};

}  // namespace tessera::checkpoint::detail
