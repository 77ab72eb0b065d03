// A DeepSpeed configuration as one more source of a run's: its values become
// values of the run's keys, with their places.
//
//   RunConfig config = read_run_config("run.json", overrides, &origins);
//   DeepSpeed deepspeed("ds.json");
//   deepspeed.apply(config, origins);
//   read_model_folder(config, origins);  // model_sizes.h
//   deepspeed.apply_batch(config, world_size, origins);
//   complete(config, world_size);
//
// What the run's file or flags give as well must be the same; "auto" leaves it
// to them, or to Tessera's default. What the file leaves open and DeepSpeed has
// a default for that changes what is trained (no clipping, a constant learning
// rate, AdamW's betas) is set, and gives way to the run's file and flags.
// Errors: TS_CHECK_CONFIG, before any rank starts: an unknown key with the
//         nearest known one, contradictions with both places, batch keys with
//         their equation, what cannot be honoured with the reason.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/engine/run_config.h"

namespace tessera::engine {

class DeepSpeed {
 public:
  // TS_CHECK_IO where the file cannot be read.
  explicit DeepSpeed(const std::string& path);
  // The same from a text; `source` names it.
  DeepSpeed(const std::string& text, const std::string& source);
  ~DeepSpeed();

  // All but the batch.
  void apply(RunConfig& config, config::Provenance& origins);
  // batch.global and batch.micro for a world of so many ranks. REQUIRES:
  // apply(); config's mesh fits the world, or TS_CHECK_CONFIG says so.
  void apply_batch(RunConfig& config, int64_t world_size,
                   config::Provenance& origins);
  // In place of that where the mesh is searched: nothing follows of the batch,
  // and batch.global must not be left to follow (TS_CHECK_CONFIG). Returns what
  // has no effect there, with the reason, or "". REQUIRES: apply().
  std::string check_searched_batch(const RunConfig& config,
                                   const config::Provenance& origins) const;

  // Keys that have no effect, with the reasons; "": none.
  std::string without_effect() const;
  // Where the file says nothing: what is meant instead. REQUIRES: a completed
  // configuration.
  std::vector<std::string> left_open(const RunConfig& config) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A table of every key that is known and what it becomes, in Markdown.
std::string deepspeed_table();

}  // namespace tessera::engine
