// Checkpoints in the memory of hosts: of every few steps, for a run that loses
// a rank, or a host. Every rank has its file on its own host and a copy on the
// next one; what a rank needs comes from a host that has it. Form, rules and
// what can be lost: docs/formats/checkpoint.md.
//
// Order:  load_newest(), or begin_anew() where the run does not go on from one
//         of them; save(); remove().
// Comm:   collective over `world`, which outlives it. A save sends each rank's
//         file once, to the next host; some small messages.
// Memory: two checkpoints of a host's files and copies while one is written.
// Errors: as checkpoint.h.
// Source: Wang et al., GEMINI: Fast Failure Recovery in Distributed Training
//         with In-Memory Checkpoints, SOSP 2023: a ring, m = 2.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/local_place.h"
#include "tessera/comm/group.h"

namespace tessera::checkpoint {

class LocalCheckpoints {
 public:
  // `hosts`: of each rank, as comm::hosts_of() has it. Throws TS_CHECK_CONFIG
  // where two of them have one folder. REQUIRES: place.checkpoints is there.
  LocalCheckpoints(const LocalPlace& place, comm::Group& world,
                   const std::vector<std::string>& hosts);
  ~LocalCheckpoints();
  LocalCheckpoints(const LocalCheckpoints&) = delete;
  LocalCheckpoints& operator=(const LocalCheckpoints&) = delete;

  // On this host.
  const std::string& folder() const;

  // The one before it goes once this one stands on every host.
  void save(int64_t step, const State& state, const std::string& mesh = "");

  // Fills the state from the newest that is newer than all in
  // place.checkpoints; returns its step. std::nullopt where there is none, or
  // none is whole: why is said.
  std::optional<int64_t> load_newest(State& state);

  // The run does not go on from one of them: they go with the first save, or
  // before where there is no room for both.
  void begin_anew();
  // To be called before a checkpoint is written there, and behind it.
  void leave_other_lines();
  void base_changed();
  // Nothing stays on the hosts that are there, or why is said.
  void remove();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint
