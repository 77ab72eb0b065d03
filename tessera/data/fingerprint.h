// What tells ranks that they read the same files: size and XXH3 of each.
//
// Comm: each comparison gathers 16 bytes a rank; where they differ, the lists.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/files.h"

namespace tessera::data {

struct FileFingerprint {
  std::string path;
  int64_t bytes = 0;
  uint64_t xxh3 = 0;  // 64 bits, of the whole file
  bool operator==(const FileFingerprint& other) const = default;
};

FileFingerprint fingerprint_of(const MappedFile& file);
FileFingerprint fingerprint_of(const std::string& name,
                               const std::string& content);

// "" when the lists of all ranks agree in sizes and hashes (paths may differ),
// else what differs first, between which ranks. `ranks[i]` is the global rank
// of `lists[i]`. REQUIRES: at least one list.
std::string difference(const std::vector<std::vector<FileFingerprint>>& lists,
                       const std::vector<int64_t>& ranks);

// Every rank of the group calls this with the files that it reads; not `reads`:
// another one reads for it. TS_CHECK_IO on every rank, with the same words,
// when those of two that read differ.
void compare_across(comm::Group& group,
                    const std::vector<FileFingerprint>& files,
                    bool reads = true);
// So they do with the caches that their text was tokenized into, behind the
// above: of the same files there may be two, of two days or two versions.
void compare_caches_across(comm::Group& group,
                           const std::vector<FileFingerprint>& caches,
                           bool reads = true);

}  // namespace tessera::data
