// Checkpoints: saved by every rank, loaded on any other mesh, never half.
//
// Form:   DIR/step-N/ with one safetensors file for each rank that owns a part
//         (which torch.distributed.checkpoint reads as they are) and
//         manifest.json; DIR/latest names the newest, DIR/best the best.
//         docs/formats/checkpoint.md.
// Saving: files and manifest are written to step-N.tmp and synced, then
//         renamed; older ones go only after that. A save that fails on one rank
//         fails on all, leaves nothing, and touches no earlier checkpoint.
//         Files are written by the caller, or beside it (BackgroundSave).
// Loading: every byte that a rank reads is verified first, every file by some
//         rank; ranks vote, and fall back together. A box is put together from
//         whatever boxes were saved.
// Comm:   collective over `world`: every rank calls with the same arguments but
//         for its own boxes. A few small messages; tensors go through files.
// Errors: TS_CHECK_IO with file and tensor; TS_CHECK_CONFIG for a checkpoint of
//         another model. Thrown on every rank alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint_config.h"
#include "tessera/comm/group.h"
#include "tessera/mesh/layout.h"

namespace tessera::checkpoint {

// This rank's part of one tensor: a weight, or a moment of the optimizer.
struct TensorEntry {
  std::string name;
  std::vector<int64_t> global_shape;
  mesh::Box box;
  at::Tensor local;     // of box.size, any strides, any device
  bool owned = true;    // true on exactly one of the ranks that hold this box
  int64_t holders = 1;  // how many these are
  // Of a tensor that older checkpoints have in slices along dim 0: their names.
  std::vector<std::string> slices = {};
  // What a checkpoint that has it in a narrower type than here may have of it
  // beside, of a wide one, which is read instead; "": nothing.
  std::string finer = {};
};

struct State {
  std::vector<TensorEntry> tensors;  // a name once
  std::string extra;                 // JSON, the same on every rank
};

struct SaveOptions {
  // Newest checkpoints that stay; 0: all.
  int64_t keep = CheckpointConfig().keep;
  // The best so far, which stays too; its folder may be the one being written.
  std::optional<int64_t> best = {};
  std::string mesh = "";  // as text, for people
};

// REQUIRES: no backward, optimizer step or other change of the tensors
//           meanwhile.
void save(const std::string& folder, int64_t step, const State& state,
          comm::Group& world, const SaveOptions& options = {});

// The same, beside what the caller does: what this rank saves is copied to the
// host's memory, and a thread of its own writes it from there. One at a time in
// a folder.
class BackgroundSave {
 public:
  // On return the tensors may change.
  // Comm: a few numbers, as every function here that all ranks call.
  BackgroundSave(const std::string& folder, int64_t step, const State& state,
                 comm::Group& world, const SaveOptions& options = {});
  // Gives a checkpoint up that was not finished: it is none, and the next save
  // removes what is there of it.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  int64_t step() const;
  // This rank's file is on the disk, or failed; ranks differ in when.
  bool is_written() const;
  // Once: waits for every rank's file. On return the checkpoint stands; throws
  // as save() does. Comm: as save().
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// `extra` of the checkpoint in that folder, before a tensor is read or
// compared: may set the state's tensors by what it says.
using Told = std::function<void(const std::string& step_folder,
                                const std::string& extra, State& state)>;

struct LoadOptions {
  // The state may lack tensors that the checkpoint has: weights alone.
  bool partial = false;
  // Tensors of another dtype are converted, instead of refused.
  bool convert = false;
  // Called on every rank, of each checkpoint that is tried. What it complains
  // of on any rank is of a checkpoint of another model: no other is tried.
  Told told = nullptr;
};

// Fills the tensors and `extra` from DIR/step-N; returns the step.
int64_t load(const std::string& step_folder, State& state, comm::Group& world,
             const LoadOptions& options = {});

// The same by one rank, a tensor at a time: they need not fit into memory
// together.
// Threads: one at a time.
class TensorReader {
 public:
  // Verifies the bytes and refuses what load() does. `wanted`: of each tensor
  // `local` has the type alone, and no elements.
  TensorReader(const std::string& step_folder, State wanted,
               const LoadOptions& options = {});
  ~TensorReader();

  // A part of it, in memory of its own; verified once more, for who writes to
  // the files meanwhile. REQUIRES: it was wanted.
  at::Tensor read(const std::string& name, const mesh::Box& box) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// What is wrong with its bytes, on any rank; "": nothing. Each rank reads a
// share of its files. Comm: collective.
std::string complaint_about(const std::string& step_folder, comm::Group& world);

// From the newest checkpoint in `folder` that is good, saying why of each that
// is not. std::nullopt where there is none at all; throws where all are bad.
std::optional<int64_t> load_latest(const std::string& folder, State& state,
                                   comm::Group& world,
                                   const LoadOptions& options = {});

// Throws TS_CHECK_CONFIG unless `folder` has room for checkpoints of that size:
// `keep` of them and one that is being written, less those that are there. For
// use before a run starts. keep = 0 asks for room for one. `others`: bytes that
// the run will have on the same disk beside them. `saves`: that it is to make.
void require_space(const std::string& folder, int64_t checkpoint_bytes,
                   const CheckpointConfig& config, int64_t others = 0,
                   int64_t saves = std::numeric_limits<int64_t>::max());

}  // namespace tessera::checkpoint
