// The store of a job with a token, in the process of rank 0: for those alone
// who prove that they know the token.
//
// Who does not prove it within two seconds is let go, and a line of the log
// tells of it. 64 who have not yet are heard at a time; of each as much is kept
// as a greeting has.
// Threads: one of its own.
#pragma once

#include <thread>

#include "tessera/core/fd.h"
#include "tessera/launch/detail/job_token.h"

namespace tessera::launch::detail {

class StoreServer {
 public:
  // `socket`: bound, not listening yet; it is closed with the server.
  // Errors: 69 where the system lets it not listen.
  StoreServer(int socket, const JobToken& token);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  const Fd socket_;
  const Fd stop_;  // an eventfd
  std::thread thread_;
};

}  // namespace tessera::launch::detail
