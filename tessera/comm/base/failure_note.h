// The first failure, for those who come later: what follows is its consequence.
// Threads: any.
#pragma once

#include <mutex>
#include <string>

namespace tessera::comm {

class FailureNote {
 public:
  void note(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (text_.empty()) text_ = text;
  }
  std::string text() const {  // "": none
    const std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

}  // namespace tessera::comm
