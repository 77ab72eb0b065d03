// Activation checkpointing for modules of one's own: what a part of a forward
// keeps for its backward is computed again there.
//
//   at::Tensor forward(at::Tensor x) {
//     for (auto& each : *blocks) {  // a ModuleList of Blocks
//       x = tessera::recompute(
//           [block = each->as<Block>()](const at::Tensor& h) {
//             return block->forward(h);
//           },
//           x);
//     }
//     return head->forward(x);
//   }
//
// Keeps:   the arguments, and the state of the process's random numbers, by
//          which dropout drops the same again. Behind a part's forward none of
//          its activations is left.
// Costs:   one more forward of the part. It does all that it did at first:
//          BatchNorm counts a batch twice in its running statistics, and what
//          ranks do together they do again.
// Forward: takes tensors and gives one, or a vector or tuple of several. What
//          else it needs it has by itself, and as long as the graph lives:
//          capture by value what may end before the backward.
// With:    fully_shard(), of one unit a part best; pipelines, whose zero-bubble
//          schedules then have all of the part's backward in the first half.
//          It is a backward inside of the backward: DistributedDataParallel
//          takes model.backward(loss), not loss.backward(), and with
//          overlap = false where a part is there more than once.
// Threads: ranks that are threads share the generator: with dropout the second
//          forward drops others, and gradients are wrong. Start such ranks as
//          processes.
// Errors:  TS_CHECK for a gradient that is itself to be differentiated.
// Source:  Chen et al. 2016, arXiv 1604.06174; as torch.utils.checkpoint with
//          use_reentrant, but that no argument need require a gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <type_traits>
#include <utility>

#include "tessera/wrappers/stage_call.h"

namespace tessera {

namespace wrappers {

using TensorsFunction = std::function<Tensors(const Tensors&)>;

Tensors recomputed(TensorsFunction forward, const Tensors& inputs);

}  // namespace wrappers

// What forward(inputs...) gives.
template <typename Forward, typename... Inputs>
auto recompute(Forward forward, const Inputs&... inputs) {
  static_assert((std::is_same_v<Inputs, at::Tensor> && ...),
                "recompute() takes tensors; let `forward` capture the rest");
  using Result = std::invoke_result_t<Forward&, const Inputs&...>;
  const wrappers::Tensors outputs = wrappers::recomputed(
      [forward = std::move(forward)](const wrappers::Tensors& each) mutable {
        return [&]<size_t... I>(std::index_sequence<I...> /*each*/) {
          return wrappers::tensors_of(forward(each[I]...));
        }(std::index_sequence_for<Inputs...>());
      },
      {inputs...});
  return wrappers::as<Result>(outputs);
}

}  // namespace tessera
