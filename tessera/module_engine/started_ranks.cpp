#include "tessera/module_engine/started_ranks.h"

#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/launch/cores.h"
#include "tessera/launch/environment.h"
#include "tessera/launch/store.h"

namespace tessera {

struct StartedRanks::Impl {
  Impl()
      : meeting(launch::join(launch::discover(launch::process_variables()))),
        context(
            {.rank = static_cast<int>(meeting.environment.rank),
             .world_size = static_cast<int>(meeting.environment.world_size)}) {
    const launch::RankEnvironment& here = meeting.environment;
    launch::take_cores(/*threads=*/0, here.local_world_size);
    if (here.source != "none") log::info(here.describe());
    ranks = comm::make_communicator({.rank = here.rank,
                                     .world_size = here.world_size,
                                     .local_world_size = here.local_world_size,
                                     .store = meeting.store,
                                     .address = meeting.address});
  }

  const launch::Meeting meeting;
  const RankContextGuard context;
  std::unique_ptr<comm::Communicator> ranks;
};

StartedRanks::StartedRanks() : impl_(std::make_unique<Impl>()) {}
StartedRanks::~StartedRanks() = default;
StartedRanks::StartedRanks(StartedRanks&&) noexcept = default;

comm::Communicator& StartedRanks::ranks() const { return *impl_->ranks; }
int64_t StartedRanks::local_rank() const {
  return impl_->meeting.environment.local_rank;
}

}  // namespace tessera
