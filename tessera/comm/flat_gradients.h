// Gradients of several parameters in one flat buffer, and their sum over a
// group. When they are summed is the owner's to say: hooks of backward
// (wrappers/), a program (parallel/data/).
//
// Views:   .grad of each parameter is a view into the buffer, in the type that
//          is asked for.
// Comm:    all_reduce(sum) of the whole buffer, `extra` included, or of one
//          bucket after another. With G bytes and N ranks a ring sends
//          2 (N-1)/N of G. A mean is the owner's to make.
// Order:   on shm sums are in rank order; no bucket changes a bit.
// Memory:  booked as gradients (core/memory_kind.h).
// Threads: as comm::Group: one thread a rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/comm/flat_buffer.h"
#include "tessera/comm/group.h"

namespace tessera::comm {

class FlatGradients {
 public:
  // Takes over .grad, its values too where there are any. `extra`, `group`: see
  // FlatBuffer.
  FlatGradients(std::vector<at::Tensor> parameters, at::ScalarType dtype,
                int64_t extra, Group* group);

  const at::Tensor& flat() const { return buffer_.flat(); }
  at::Tensor view(size_t i) const { return buffer_.view(i); }
  at::Tensor extra() const { return buffer_.extra(); }

  // Whether .grad of this parameter still is its view: only then is it summed.
  bool is_in_place(size_t i) const;
  // Makes .grad the view again, with the values of the tensor that is there, or
  // zeros where there is none.
  void adopt(size_t i);
  // Makes .grad views again, where an optimizer's zero_grad() took them away.
  void attach();
  void zero();

  // `bucket_bytes`: of an all_reduce, at most; 0: all at once.
  void begin_all_reduce(Group& group, Mode mode = Mode::kAsync,
                        int64_t bucket_bytes = 0);
  void await_all_reduce();

 private:
  std::vector<at::Tensor> parameters_;
  FlatBuffer buffer_;
  std::vector<Work> works_;
};

// Of so many elements in all, so many go in one all_reduce.
int64_t elements_of_bucket(int64_t bytes, int64_t all, int64_t item);

using TypeOfGradient = std::function<at::ScalarType(const at::Tensor&)>;

// Cuts parameters, in `order`, into those that share a buffer: their gradients
// are of one type and of so many bytes at most, unless one alone is more.
std::vector<std::vector<size_t>> cut_into_buckets(
    const std::vector<at::Tensor>& parameters, const std::vector<size_t>& order,
    const TypeOfGradient& type_of, int64_t bytes);

}  // namespace tessera::comm
