// Messages over the send and recv of any c10d::Backend.
//
// All go with one tag, kTag, which users of the same backend leave alone.
// Errors: the backend's, with the peer's rank in front (TS_CHECK_REACH).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/comm/algorithms/transport.h"

namespace tessera::comm::algorithms {

class BackendTransport : public Transport {
 public:
  // The largest that every MPI allows.
  static constexpr int kTag = 32767;

  explicit BackendTransport(c10::intrusive_ptr<c10d::Backend> backend)
      : backend_(std::move(backend)) {}

  int64_t rank() const override { return backend_->getRank(); }
  int64_t size() const override { return backend_->getSize(); }
  std::unique_ptr<Pending> send(std::span<const std::byte> data,
                                int64_t peer) override;
  std::unique_ptr<Pending> recv(std::span<std::byte> data,
                                int64_t peer) override;

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace tessera::comm::algorithms
