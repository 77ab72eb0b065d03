// One operation at one size, with the buffers that it goes through.
//
// Use:    rewrite() (call()) count_wrong(), in this order, again and again; all
//         ranks alike. rewrite() gives every buffer new values, written by the
//         rank that owns it: where only the operation touches them, they stay
//         in one core's cache, and the figures lie.
// Copies: call() runs the operation once on each of several sets of buffers,
//         one call after the other, so that what is shorter than reading a
//         clock can be timed too.
// Comm:   the operation alone; send_recv goes round the ring of ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/benchmark/operation.h"
#include "tessera/benchmark/pattern.h"
#include "tessera/comm/group.h"

namespace tessera::benchmark {

struct Case {
  Operation operation = Operation::kAllReduce;
  at::ScalarType dtype = at::kFloat;
  // Unused where nothing is reduced.
  comm::ReduceOp redop = comm::ReduceOp::kSum;
  int64_t bytes = 0;  // as asked for; counts_of() tells S
};

using Allocate = std::function<at::Tensor(int64_t numel, at::ScalarType dtype)>;

class Exchange {
 public:
  // `group` and `pattern` must outlive it.
  Exchange(const Case& what, comm::Group& group, const Pattern& pattern,
           const Allocate& allocate, int64_t copies);

  void rewrite();
  void call();
  // Elements of this rank's results that are not what they should be.
  int64_t count_wrong() const;

 private:
  struct Buffers {
    at::Tensor input;
    at::Tensor output;  // undefined: in place
  };
  void run(Buffers& buffers);
  void write_input(Buffers& buffers, int64_t round);
  int64_t wrong_in(const Buffers& buffers, int64_t round) const;
  int64_t wrong_in_pieces(const at::Tensor& output, int64_t round) const;
  int64_t next() const { return (group_.rank() + 1) % group_.size(); }
  int64_t before() const {
    return (group_.rank() + group_.size() - 1) % group_.size();
  }

  Case case_;
  comm::Group& group_;
  const Pattern& pattern_;
  std::vector<Buffers> buffers_;
  int64_t copies_;
  int64_t round_ = 0;
};

}  // namespace tessera::benchmark
