// Hears when something is computed with a parameter, whatever module does it:
// LibTorch's modules have no hooks in C++, and call what they like.
//
// A tensor that is heard, and every view of it, carries one more dispatch key.
// An operator that is given one goes first through a fallback here, which tells
// the listener whose memory it is, and then runs as it would have run: also in
// backward, for what autograd saved.
// Cost:    about a microsecond an operator on such a tensor; none on others.
// Key:     DeferredInit, which LibTorch keeps for code outside of it.
// Threads: a listener is called on the thread that computes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <vector>

namespace tessera::wrappers {

class Listener {
 public:
  virtual ~Listener() = default;
  // An operator is about to read or write memory that has this tag. What the
  // listener itself computes is not heard.
  virtual void on_use(int64_t tag) = 0;
};

class HeardMemory {
 public:
  explicit HeardMemory(Listener& listener) : listener_(listener) {}
  // Its memory is not heard any more.
  ~HeardMemory();
  HeardMemory(const HeardMemory&) = delete;
  HeardMemory& operator=(const HeardMemory&) = delete;

  // From now on, of all that views the memory of `tensor` by this tensor.
  void hear(const at::Tensor& tensor, int64_t tag);

 private:
  Listener& listener_;
  std::vector<c10::Storage> heard_;
};

// While it lives nothing that this thread computes is heard.
class Unheard {
 public:
  Unheard();

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace tessera::wrappers
