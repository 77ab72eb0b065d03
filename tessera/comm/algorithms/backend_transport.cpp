#include "tessera/comm/algorithms/backend_transport.h"

#include <ATen/ops/from_blob.h>

#include "tessera/core/error.h"

namespace tessera::comm::algorithms {
namespace {

class Message : public Transport::Pending {
 public:
  Message(c10::intrusive_ptr<c10d::Work> work, const char* what, int64_t peer)
      : work_(std::move(work)), what_(what), peer_(peer) {}

  void wait() override {
    try {
      work_->wait();
    } catch (const std::exception& error) {
      TS_CHECK_REACH(false, "a message ", what_, " rank ", peer_,
                     " of the group failed: ", message_of(error));
    }
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  const char* what_;
  int64_t peer_;
};

// What is sent is in a tensor too, which nobody writes to.
std::vector<at::Tensor> bytes_at(const std::byte* data, size_t size) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  return {at::from_blob(const_cast<std::byte*>(data),
                        {static_cast<int64_t>(size)}, at::kByte)};
}

}  // namespace

std::unique_ptr<Transport::Pending> BackendTransport::send(
    std::span<const std::byte> data, int64_t peer) {
  std::vector<at::Tensor> tensors = bytes_at(data.data(), data.size());
  return std::make_unique<Message>(
      backend_->send(tensors, static_cast<int>(peer), kTag), "to", peer);
}

std::unique_ptr<Transport::Pending> BackendTransport::recv(
    std::span<std::byte> data, int64_t peer) {
  std::vector<at::Tensor> tensors = bytes_at(data.data(), data.size());
  return std::make_unique<Message>(
      backend_->recv(tensors, static_cast<int>(peer), kTag), "from", peer);
}

}  // namespace tessera::comm::algorithms
