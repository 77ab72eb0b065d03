// The store of a job with a token: keys and values in the memory of rank 0, for
// those alone who prove that they know the token.
//
// Who does not prove it within two seconds is let go, and a line of the log
// tells of it; of those at most 64 are heard at a time, and nothing of them is
// kept but what a greeting has.
// Threads: one of its own.
#pragma once

#include <thread>

#include "tessera/launch/detail/job_token.h"

namespace tessera::launch::detail {

class StoreServer {
 public:
  // `socket`: bound, not listening yet; it is closed with the server.
  StoreServer(int socket, const JobToken& token);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  const int socket_;
  const int stop_;  // an eventfd
  std::thread thread_;
};

}  // namespace tessera::launch::detail
