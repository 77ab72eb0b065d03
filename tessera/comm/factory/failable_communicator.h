// A communicator that can be told that its rank has failed.
#pragma once

#include <memory>
#include <string>

#include "tessera/comm/communicator.h"

namespace tessera::comm {

class FailableCommunicator : public Communicator {
 public:
  // Makes what is pending, here and on the peers, fail for this reason.
  virtual void fail(const std::string& why) = 0;
};

std::unique_ptr<FailableCommunicator> make_failable_communicator(
    const CommunicatorOptions& options);

}  // namespace tessera::comm
