#include "tessera/engine/wire.h"

namespace tessera::engine {

Wire wire_of(const parallel::Composed& composed,
             const program::Instruction& message) {
  const int64_t stages = composed.pipeline->size();
  const auto ends = program::ends_of(message, composed.pipeline->rank(), stages,
                                     composed.model.placement);
  const auto chunks = static_cast<int64_t>(composed.units.chunks.size());
  const int64_t receiver = message.microbatch * chunks * stages + ends.receiver;
  return {.sends = ends.sends,
          .activations = ends.activations,
          .peer = ends.peer_stage,
          .tag = receiver * 2 + (ends.activations ? 1 : 0)};
}

}  // namespace tessera::engine
