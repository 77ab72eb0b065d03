// Hears when something is computed with a parameter, whatever module does it:
// LibTorch's modules have no hooks in C++, and call what they like.
//
// A tensor that is heard, and every view of it, carries one more dispatch key.
// An operator that is given one goes first through a fallback here, which tells
// the listener whose memory it is, and then runs as it would have run: also in
// backward, for what autograd saved.
// Cost:    about a microsecond an operator on such a tensor; none on others.
// So too may an operator on a parameter, of a forward, be replaced by something
// else that a substitute computes; and Linear's products, which no substitute
// takes, are those of nn/matmul.h.
// Key:     DeferredInit, which LibTorch keeps for code outside of it.
// Threads: a listener is called on the thread that computes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::wrappers {

class Listener {
 public:
  virtual ~Listener() = default;
  // An operator is about to read or write memory that has this tag, by this
  // tensor. What the listener itself computes is not heard.
  virtual void on_use(int64_t tag, const at::Tensor& tensor) = 0;
  // And writes to it.
  virtual void on_write(int64_t tag, const std::string& op) = 0;
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

class Substitute {
 public:
  virtual ~Substitute() = default;
  // Takes the operator's arguments from the stack and puts results there, or
  // leaves both alone and returns false. What it computes goes no way of ours.
  virtual bool run(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                   int64_t tag) = 0;
  // Those that have shares of its parameters.
  virtual const comm::Group& group() const = 0;
};

// Of a parameter that is one of equal parts of a whole: along which dim, who
// has them, in their order, and which is this one.
struct Share {
  int64_t dim = 0;
  std::vector<int64_t> ranks;
  int64_t index = 0;
};
// None: the parameter is whole.
std::optional<Share> known_share(const at::Tensor& parameter);

class SubstitutedParameters {
 public:
  explicit SubstitutedParameters(Substitute& substitute)
      : substitute_(substitute) {}
  ~SubstitutedParameters();
  SubstitutedParameters(const SubstitutedParameters&) = delete;
  SubstitutedParameters& operator=(const SubstitutedParameters&) = delete;

  // From now on, of this tensor and of views that begin where it does; outside
  // of backward. `shared_dim`: of which other ranks have other parts; -1: none.
  void add(const at::Tensor& parameter, int64_t tag, int64_t shared_dim);

 private:
  Substitute& substitute_;
};

// What replaces a parameter's operators, to go with it where it gets other
// memory.
class CarriedSubstitute {
 public:
  // Of where the parameter lies now, from where it is taken away.
  explicit CarriedSubstitute(const at::Tensor& parameter);
  void put(const at::Tensor& parameter) const;

 private:
  Substitute* substitute_ = nullptr;
  int64_t tag_ = 0;
  int64_t shared_dim_ = -1;
};

class OperatorTaker {
 public:
  virtual ~OperatorTaker() = default;
  // Takes an operator's arguments from the stack and puts results there. What
  // it computes goes no way of ours.
  virtual void take(const c10::OperatorHandle& op,
                    torch::jit::Stack* stack) = 0;
};

// While it lives every operator of this thread goes to `taker`, those that make
// tensors too.
class TakenOperators {
 public:
  explicit TakenOperators(OperatorTaker& taker);
  ~TakenOperators();
  TakenOperators(const TakenOperators&) = delete;
  TakenOperators& operator=(const TakenOperators&) = delete;

 private:
  OperatorTaker* const before_;
  c10::impl::IncludeDispatchKeyGuard guard_;
};

// While it lives what this thread computes is a forward, though a backward is
// under way: parameters are substituted, and products ours.
class ForwardAgain {
 public:
  ForwardAgain();
  ~ForwardAgain();
  ForwardAgain(const ForwardAgain&) = delete;
  ForwardAgain& operator=(const ForwardAgain&) = delete;

 private:
  const bool before_;
};

// A tensor whose operators are not heard, nor replaced: one more view.
at::Tensor unheard(const at::Tensor& tensor);

// While it lives nothing that this thread computes is heard.
class Unheard {
 public:
  Unheard();

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace tessera::wrappers
