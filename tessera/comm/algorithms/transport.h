// Messages between the ranks of a group: all that the algorithms here ask for.
//
// Order:  messages between two ranks arrive in the order in which they were
//         sent; a transport over a backend sends all of them with one tag.
// Async:  send and recv return at once. The memory must stay untouched until
//         wait() returns. Sends that cross never block each other.
// Errors: a peer that is gone, or late beyond the time-out, fails wait().
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace tessera::comm::algorithms {

class Transport {
 public:
  class Pending {
   public:
    virtual ~Pending() = default;
    virtual void wait() = 0;
  };

  virtual ~Transport() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;
  virtual std::unique_ptr<Pending> send(std::span<const std::byte> data,
                                        int64_t peer) = 0;
  virtual std::unique_ptr<Pending> recv(std::span<std::byte> data,
                                        int64_t peer) = 0;
  // Told of the bytes that a step of an algorithm has just reduced.
  virtual void reduced(int64_t bytes) {}
};

// Sends and waits. Nothing is sent where there is nothing: both sides know.
void send_to(Transport& transport, std::span<const std::byte> data,
             int64_t peer);
// Receives and waits.
void recv_from(Transport& transport, std::span<std::byte> data, int64_t peer);
// Both at once: a step of most algorithms.
void exchange(Transport& transport, std::span<const std::byte> sent, int64_t to,
              std::span<std::byte> received, int64_t from);

// Some ranks of another transport, as a group of their own.
class Subset : public Transport {
 public:
  // `members`: ranks of `whole`, this one among them, in the order of the ranks
  // here.
  Subset(Transport& whole, std::vector<int64_t> members);

  int64_t rank() const override { return rank_; }
  int64_t size() const override {
    return static_cast<int64_t>(members_.size());
  }
  std::unique_ptr<Pending> send(std::span<const std::byte> data,
                                int64_t peer) override;
  std::unique_ptr<Pending> recv(std::span<std::byte> data,
                                int64_t peer) override;
  void reduced(int64_t bytes) override { whole_.reduced(bytes); }

 private:
  Transport& whole_;
  std::vector<int64_t> members_;
  int64_t rank_ = 0;
};

}  // namespace tessera::comm::algorithms
