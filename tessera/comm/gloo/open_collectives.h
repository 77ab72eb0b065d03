// Gloo's own collectives that have not ended.
//
// Gloo tells nobody of one of which a part had moved when its peer's line
// closed, and ends it only when its time is out: where the group fails, who
// waits for it is told here.
// Threads: any. What is kept lives as long as Gloo may end it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/comm/base/worker.h"

namespace tessera::comm::gloo {

class OpenCollectives : public std::enable_shared_from_this<OpenCollectives> {
 public:
  // Ends as `collective` does, which nobody else waits for; where that
  // succeeded, after `then`.
  c10::intrusive_ptr<PendingWork> track(
      const c10::intrusive_ptr<c10d::Work>& collective, int rank,
      c10d::OpType type, std::vector<at::Tensor> tensors,
      std::function<void()> then = {});
  // All that are open fail, and those that come later.
  void fail(const std::string& why);
  // Until none is open.
  void wait();
  // Gloo has some to do still that have failed here.
  bool is_held_up() const;

 private:
  // nullptr: it is told already.
  c10::intrusive_ptr<PendingWork> take(const PendingWork& work);

  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::map<const PendingWork*, c10::intrusive_ptr<PendingWork>> open_;
  int64_t num_unended_ = 0;  // by Gloo
  std::exception_ptr failure_;
};

}  // namespace tessera::comm::gloo
