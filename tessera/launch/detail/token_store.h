// The store of a job with a token, as a rank sees it: c10d's, over a connection
// to rank 0's StoreServer on which both have proved that they know the token.
//
// Comm:    a request and its answer for each call; a copy (clone()) has a
//          connection of its own.
// Errors:  c10::DistStoreError where a wait is over; c10::DistNetworkError
//          where the connection is, or nothing greets within the time-out;
//          TS_CHECK_REACH for a server that does not know the token.
// Threads: any; a call that waits holds up the others of this object, as those
//          of c10d's TCPStore do.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/core/fd.h"
#include "tessera/launch/detail/job_token.h"
#include "tessera/launch/detail/store_messages.h"
#include "tessera/launch/detail/store_server.h"

namespace tessera::launch::detail {

struct TokenStoreOptions {
  std::string host;
  uint16_t port = 0;
  JobToken token;
  std::chrono::milliseconds timeout;
  // Of rank 0, which serves the store: it and its copies keep it alive.
  std::shared_ptr<StoreServer> server = {};
};

class TokenStore final : public c10d::Store {
 public:
  explicit TokenStore(TokenStoreOptions options);

  c10::intrusive_ptr<Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key,
                                  const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  // Or tells `why` not.
  bool try_to_connect(std::string& why);
  // The fields of the answer; nullopt: the time was over.
  std::optional<std::string> ask(const MessageWriter& request);
  int64_t ask_number(const MessageWriter& request);
  std::vector<uint8_t> ask_bytes(const MessageWriter& request,
                                 const std::string& key);

  const TokenStoreOptions options_;
  std::mutex mutex_;
  Fd socket_;
  std::optional<Seal> sent_, came_;
};

}  // namespace tessera::launch::detail
