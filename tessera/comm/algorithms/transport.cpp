#include "tessera/comm/algorithms/transport.h"

#include <algorithm>

namespace tessera::comm::algorithms {

void send_to(Transport& transport, std::span<const std::byte> data,
             int64_t peer) {
  if (!data.empty()) transport.send(data, peer)->wait();
}

void recv_from(Transport& transport, std::span<std::byte> data, int64_t peer) {
  if (!data.empty()) transport.recv(data, peer)->wait();
}

void exchange(Transport& transport, std::span<const std::byte> sent, int64_t to,
              std::span<std::byte> received, int64_t from) {
  std::unique_ptr<Transport::Pending> incoming, outgoing;
  if (!received.empty()) incoming = transport.recv(received, from);
  if (!sent.empty()) outgoing = transport.send(sent, to);
  if (incoming) incoming->wait();
  if (outgoing) outgoing->wait();
}

Subset::Subset(Transport& whole, std::vector<int64_t> members)
    : whole_(whole), members_(std::move(members)) {
  rank_ = std::find(members_.begin(), members_.end(), whole_.rank()) -
          members_.begin();
}

std::unique_ptr<Transport::Pending> Subset::send(
    std::span<const std::byte> data, int64_t peer) {
  return whole_.send(data, members_[peer]);
}

std::unique_ptr<Transport::Pending> Subset::recv(std::span<std::byte> data,
                                                 int64_t peer) {
  return whole_.recv(data, members_[peer]);
}

}  // namespace tessera::comm::algorithms
