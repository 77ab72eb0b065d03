// A module that is made without memory: what its constructors compute is
// recorded, and computed when fully_shard() takes it, one parameter after the
// other, of which each rank keeps its shard. No rank ever holds the whole.
//
//   tessera::DeferredInit deferred;
//   GPT gpt = deferred.make([&] { return GPT(config); });
//   auto model =
//       tessera::fully_shard(gpt, mesh, ranks, {.deferred = &deferred});
//
// Values:  bit for bit those of a module that is made without it, by the
//          process's generator as it was in the beginning of make(), which is
//          left as it was; of rank 0, as with any module.
// Until then parameters and buffers are of the device meta: they have shapes,
//          dtypes and no values. What is done with them outside of make(), as
//          to(at::kDouble), is not recorded: do it inside.
// Memory:  the rank's shards, and the whole of one parameter at a time.
// Errors:  operators that need values to go on (item()) are LibTorch's errors;
//          parameters that were not made inside of make() are refused by name.
// Limits:  what writes to memory by a pointer is not seen: torch::from_blob
//          gives a real tensor, from which parameters may be copied.
// Threads: of one thread; ranks that are threads have one each.
// Source:  deferred initialisation as torchdistX has it: operators recorded on
//          tensors of the device meta, and run again.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

namespace tessera {

class DeferredInit {
 public:
  DeferredInit();
  ~DeferredInit();
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;

  // What `make_module` returns: a holder, or a pointer to a module.
  template <typename Make>
  std::invoke_result_t<Make> make(const Make& make_module) {
    const Recording recording(*this);
    return make_module();
  }

  // Runs what was recorded. `take(i, values)` is called for each of `tensors`,
  // once, in the order in which they got their last values: after it they are
  // freed. With `compute` false nothing is run, and the values are undefined.
  // REQUIRES: tensors of make(). Errors: TS_CHECK for others, by number.
  void replay(const std::vector<at::Tensor>& tensors, bool compute,
              const std::function<void(size_t, const at::Tensor&)>& take) const;
  // Whether it has values here, in make()'s way.
  bool made(const at::Tensor& tensor) const;

 private:
  struct Impl;
  class Recording {
   public:
    explicit Recording(DeferredInit& of);
    ~Recording();

   private:
    struct Guard;
    std::unique_ptr<Guard> guard_;
  };

  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
