#include "tests/support/memory_transport.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::testing {

using comm::algorithms::Link;
using comm::algorithms::Transport;

class MemoryNetwork::End : public Transport {
 public:
  End(MemoryNetwork& network, int64_t rank, int64_t size)
      : network_(network), rank_(rank), size_(size) {}

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  const RankCost& cost() const { return cost_; }

  std::unique_ptr<Pending> send(std::span<const std::byte> data,
                                int64_t peer) override {
    const auto bytes = static_cast<int64_t>(data.size());
    way_out_free_ = std::max(way_out_free_, cost_.seconds) +
                    network_.link_.seconds(1, bytes);
    cost_.messages += 1;
    cost_.bytes += bytes;
    {
      std::lock_guard lock(network_.mutex_);
      network_.in_flight_[{rank_, peer}].push_back(
          {{data.begin(), data.end()}, way_out_free_});
    }
    network_.changed_.notify_all();
    return std::make_unique<Sent>(*this, way_out_free_);
  }

  std::unique_ptr<Pending> recv(std::span<std::byte> data,
                                int64_t peer) override {
    return std::make_unique<Incoming>(*this, data, peer);
  }

  void reduced(int64_t bytes) override {
    cost_.reduced += bytes;
    cost_.seconds += network_.link_.gamma * static_cast<double>(bytes);
  }

 private:
  struct Sent : Pending {
    Sent(End& from, double at) : end(from), done(at) {}
    void wait() override { end.go_on_at(done); }
    End& end;
    double done;
  };

  struct Incoming : Pending {
    Incoming(End& to, std::span<std::byte> place, int64_t from)
        : end(to), data(place), peer(from) {}
    void wait() override {
      const Message message = end.take(peer);
      TS_CHECK(message.data.size() == data.size(), "rank ", end.rank_,
               " receives ", data.size(), " bytes from rank ", peer,
               ", which sent ", message.data.size(), ".");
      std::copy(message.data.begin(), message.data.end(), data.begin());
      end.arrive(message);
    }
    End& end;
    std::span<std::byte> data;
    int64_t peer;
  };

  void go_on_at(double time) { cost_.seconds = std::max(cost_.seconds, time); }

  void arrive(const Message& message) {
    const auto bytes = static_cast<int64_t>(message.data.size());
    way_in_free_ =
        std::max(message.sent, way_in_free_ + network_.link_.seconds(1, bytes));
    go_on_at(way_in_free_);
  }

  Message take(int64_t peer) {
    std::unique_lock lock(network_.mutex_);
    std::deque<Message>& queue = network_.in_flight_[{peer, rank_}];
    network_.changed_.wait(lock, [&] { return !queue.empty(); });
    Message message = std::move(queue.front());
    queue.pop_front();
    return message;
  }

  MemoryNetwork& network_;
  const int64_t rank_;
  const int64_t size_;
  RankCost cost_;
  double way_out_free_ = 0.0;
  double way_in_free_ = 0.0;
};

MemoryNetwork::MemoryNetwork(int64_t ranks, Link link) : link_(link) {
  for (int64_t rank = 0; rank < ranks; ++rank) {
    ends_.push_back(std::make_shared<End>(*this, rank, ranks));
  }
}

Transport& MemoryNetwork::end_of(int64_t rank) { return *ends_.at(rank); }

const RankCost& MemoryNetwork::cost_of(int64_t rank) const {
  return ends_.at(rank)->cost();
}

double MemoryNetwork::seconds() const {
  double last = 0.0;
  for (const auto& end : ends_) last = std::max(last, end->cost().seconds);
  return last;
}

}  // namespace tessera::testing
