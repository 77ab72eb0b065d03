// Which algorithm is the fastest, as measured: what `tessera bench comm --tune`
// writes and comm.algorithm=auto reads. docs/formats/tuning_table.md has the
// format.
//
// What no entry covers is left to the backend's own algorithm. Every rank must
// read the same table: fingerprint() tells.
// Errors: TS_CHECK_CONFIG with file:line:column, key, value and rule.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/algorithms/collectives.h"

namespace tessera::comm::algorithms {

// The algorithm for [min_bytes, max_bytes) of one verb.
struct TuningEntry {
  Verb verb = Verb::kAllReduce;
  std::string backend;  // that carries the messages: "gloo", "shm", "mpi"
  int64_t ranks = 2;    // of the group; across hosts: hosts
  int64_t min_bytes = 0;
  int64_t max_bytes = std::numeric_limits<int64_t>::max();
  Algorithm algorithm = Algorithm::kOwn;
  bool operator==(const TuningEntry&) const = default;
};

class TuningTable {
 public:
  TuningTable() = default;  // empty: everything is the backend's own
  // Throws TS_CHECK where entries overlap, or ask for what there is not.
  explicit TuningTable(std::vector<TuningEntry> entries,
                       std::string machine = "");

  static TuningTable parse(const std::string& text, const std::string& source);
  static TuningTable read(const std::filesystem::path& path);
  // What TESSERA_COMM_TABLE names; empty where it is not set.
  static TuningTable from_environment();

  Algorithm algorithm_for(Verb verb, const std::string& backend, int64_t ranks,
                          int64_t bytes) const;
  // Whether one of the entries is about this backend.
  bool knows(const std::string& backend) const;
  const std::vector<TuningEntry>& entries() const { return entries_; }
  bool empty() const { return entries_.empty(); }

  // As read() reads it; ordered by verb, backend, ranks and bytes.
  std::string to_json() const;
  void write(const std::filesystem::path& path) const;
  // "no table", or a hash of the entries.
  std::string fingerprint() const;

 private:
  std::vector<TuningEntry> entries_;
  std::string machine_;
};

}  // namespace tessera::comm::algorithms
