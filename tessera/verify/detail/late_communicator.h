// A communicator that is as late as the contract of comm::Group allows, as that
// of a device may be, to bring out what was not awaited, and what was awaited
// without need, on every machine alike.
//
// What an operation writes holds kPoison until it is awaited, and only then
// what came; what it reads was taken when it was begun.
// Comm:   that of the communicator inside; what is done at once passes through.
// Errors: TS_CHECK, which names the instruction that began the operation, where
//         what it reads or writes was changed before it was awaited, and where
//         it was let go of without: at the next operation; and where it is
//         awaited by another instruction than its await, or, if it was begun
//         inside of one, than that.
// Memory: a copy of all that is under way.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::verify::detail {

constexpr double kPoison = 3.0;

class LateGroup;
struct Ledger;

// Where this rank waited for an operation.
struct Wait {
  std::string during;  // rank_context().doing
  std::string verb;
  bool inside = false;  // of the call that began it
};

class LateCommunicator final : public comm::Communicator {
 public:
  // REQUIRES: `inside` outlives it, and whatever it began.
  explicit LateCommunicator(comm::Communicator& inside);
  ~LateCommunicator() override;
  LateCommunicator(const LateCommunicator&) = delete;
  LateCommunicator& operator=(const LateCommunicator&) = delete;

  int64_t rank() const override { return inside_.rank(); }
  int64_t world_size() const override { return inside_.world_size(); }
  const std::string& backend() const override { return inside_.backend(); }
  comm::Group& world() override { return *late(&inside_.world()); }
  comm::Group* make_group(const std::vector<int64_t>& ranks,
                          const std::string& name) override {
    return late(inside_.make_group(ranks, name));
  }
  std::vector<comm::Group*> groups() override;
  double seconds_busy() const override { return inside_.seconds_busy(); }
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return inside_.empty(sizes, dtype);
  }

  // Since the last call.
  std::vector<Wait> take_waits();
  // Throws where something that was begun was never awaited.
  void expect_all_awaited() const;

 private:
  comm::Group* late(comm::Group* group);

  comm::Communicator& inside_;
  std::shared_ptr<Ledger> ledger_;
  std::map<comm::Group*, std::unique_ptr<LateGroup>> groups_;
};

}  // namespace tessera::verify::detail
