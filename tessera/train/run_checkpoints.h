// The checkpoints that a run writes as it goes on.
//
// A checkpoint that is due while the run goes on may fail, as by a full disk:
// that is told, in words and in the next line of metrics.jsonl where there is
// one, and the next one is tried when it is due. The last one, of a run that
// ends or is stopped, must stand. None is left half: checkpoint/checkpoint.h.
// With checkpoint.async what is due is written beside the steps that follow. It
// stands after the first of them that no rank began still writing, or before
// the next checkpoint, which waits for it.
// Those in the memory of hosts (checkpoint/local.h) are written between them.
//
// Comm:   collective over `world`: every rank calls alike.
// Errors: TS_CHECK_IO on every rank, of the last one alone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/local.h"
#include "tessera/comm/group.h"

namespace tessera::train {

class RunCheckpoints {
 public:
  // What a checkpoint is of, asked for when it is taken.
  struct Content {
    checkpoint::State state;
    checkpoint::SaveOptions options = {};
  };
  using TakeContent = std::function<Content()>;

  RunCheckpoints(std::string folder, comm::Group& world, bool in_background)
      : folder_(std::move(folder)),
        world_(world),
        in_background_(in_background) {}

  // Those in the memory of hosts; nullptr: there are none.
  void set_local(std::unique_ptr<checkpoint::LocalCheckpoints> local) {
    local_ = std::move(local);
  }
  checkpoint::LocalCheckpoints* local() { return local_.get(); }

  // The run goes on from this one.
  void found(int64_t step) { newest_ = step; }
  // Elsewhere than in the memory of hosts.
  bool stands(int64_t step) const { return newest_ == step && !under_way_; }

  // Of the step that is due, and goes on; nothing where it is the newest.
  void save_due(int64_t step, const TakeContent& take);
  // In the memory of hosts; of several that fail in a row the first is told,
  // and now and then another.
  // REQUIRES: set_local().
  void save_local(int64_t step, const TakeContent& take);
  // Of the last one; what is being written stands too, or was told.
  void save_last(int64_t step, const TakeContent& take);

  // Here or in the memory of hosts.
  bool has_saved() const { return has_saved_; }

  // This rank's part of one.
  bool is_writing() const { return under_way_ && !under_way_->is_written(); }
  // Behind a step in which no rank was: what was under way stands.
  void finish();
  // The step of one that failed since this was asked for last.
  std::optional<int64_t> take_failed();

 private:
  // Whether it succeeds. A failed one is told, unless it is no news, and is not
  // the newest.
  bool try_to(int64_t step, const std::function<void()>& work,
              bool is_news = true);
  // Before one is written: those in the memory of hosts from which the run did
  // not go on are of another line of steps.
  void leave_other_lines();
  // It stands.
  void note_saved(int64_t step);

  const std::string folder_;
  comm::Group& world_;
  const bool in_background_;
  std::unique_ptr<checkpoint::LocalCheckpoints> local_;
  std::unique_ptr<checkpoint::BackgroundSave> under_way_;
  int64_t local_failures_ = 0;  // in a row
  int64_t newest_ = -1;         // -1: none; it stands, or is under way
  std::optional<int64_t> failed_;
  bool has_saved_ = false;
};

}  // namespace tessera::train
