// Follows the programs of a module (pass_programs.h) as the module's own code
// computes: hears which parameters are used, and runs the program as far as the
// gather that brings them.
//
// Order:   what another rank uses and this one does not is gathered, freed and
//          reduced on the way, so that ranks may leave out units. A use that
//          the rest of the program does not have, in another order or of a
//          second forward before the backward, runs the program to its end and
//          begins it again; ranks that need not take part in that by repeat().
// Comm:    of the instructions (parallel/data/sharded_parameters.h).
// Errors:  a use outside of a forward and a backward; a write of a forward to
//          what a gather makes anew; a gradient that somebody reads who was
//          given whole parameters.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/parallel/data/sharded_parameters.h"
#include "tessera/program/executor.h"
#include "tessera/wrappers/detail/heard_memory.h"
#include "tessera/wrappers/detail/pass_programs.h"

namespace tessera::wrappers {

enum class Part { kNone, kForward, kEvaluation, kBackward };

class PassFollower : public Listener, program::Actor {
 public:
  // `names`, `stages`: by owner. `enter`: called before a part begins, or
  // begins again. `on_backward`: this rank's backward is heard to begin.
  // `on_gradient`: it adds to this gradient.
  PassFollower(parallel::data::ShardedParameters& parameters,
               std::vector<std::string> names, std::vector<int64_t> stages,
               std::function<void(Part, bool again)> enter,
               std::function<void()> on_backward,
               std::function<void(const at::Tensor&)> on_gradient);

  void set_programs(PassPrograms programs);
  const PassPrograms& programs() const { return programs_; }

  void begin(Part part);
  // The rest of the part. Behind a forward what the backward needs stays.
  void finish();
  // Once more, with nothing to compute: for others who began it again.
  void repeat(Part part);
  // What a step's last backward is followed by.
  void complete();
  Part part() const { return part_; }

  // All gathered, or none: for who reads parameters outside of a pass.
  void gather_all();
  void free_all();

  // The owners but 0 whose parameters the last forward used, as it did.
  const std::vector<int64_t>& visits() const { return visits_; }

  // Of an owner: whole parameters of which shards are a part, or which a gather
  // makes of shards that lie elsewhere; gradients that autograd adds to.
  enum class Kind : int64_t { kMasters, kCopies, kGradients };
  static int64_t tag_of(int64_t owner, Kind kind);
  void on_use(int64_t tag, const at::Tensor& tensor) override;
  void on_write(int64_t tag, const std::string& op) override;

 private:
  void on_gradient(int64_t owner, const at::Tensor& gradient);
  void advance(program::Op op, program::Phase phase, int64_t owner);
  bool try_advance(program::Op op, program::Phase phase, int64_t owner);
  void run(const program::Program& program, size_t first, size_t last);
  void enter(Part part);
  void hold(const std::vector<bool>& owners);
  const program::Program& program() const;
  std::string name(int64_t owner) const;

  void begin(const program::Instruction& instruction,
             bool awaited_next) override;
  void await(const program::Instruction& instruction) override;
  void free_parameters(int64_t owner) override;
  void allocate_gradients(int64_t owner) override;

  parallel::data::ShardedParameters& parameters_;
  const std::vector<std::string> names_;
  const std::vector<int64_t> stages_;
  const std::function<void(Part, bool)> enter_;
  const std::function<void()> on_backward_;
  const std::function<void(const at::Tensor&)> on_gradient_;
  PassPrograms programs_;
  Part part_ = Part::kNone;
  size_t position_ = 0;  // in the program of the part
  std::vector<bool> gathered_, under_way_, allocated_;  // by owner
  std::vector<int64_t> visits_;
};

}  // namespace tessera::wrappers
