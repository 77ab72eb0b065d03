// How a stage of a pipeline calls its module, whatever its forward() takes and
// gives: a tensor, several, or a vector of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/core/error.h"

namespace tessera::wrappers {

using Tensors = std::vector<at::Tensor>;

// Of tensors that go from one stage to the next.
inline constexpr int64_t kMostTensors = 8;

inline Tensors tensors_of(const at::Tensor& one) { return {one}; }
inline Tensors tensors_of(Tensors several) { return several; }
template <typename... Each>
Tensors tensors_of(const std::tuple<Each...>& several) {
  return std::apply(
      [](const Each&... each) { return Tensors{at::Tensor(each)...}; },
      several);
}

// The other way: as what a function gave that gave this type.
template <typename Result>
Result as(const Tensors& tensors) {
  if constexpr (std::is_same_v<Result, at::Tensor>) {
    return tensors[0];
  } else if constexpr (std::is_same_v<Result, Tensors>) {
    return tensors;
  } else {
    return [&]<size_t... I>(std::index_sequence<I...> /*each*/) {
      return Result{tensors[I]...};
    }(std::make_index_sequence<std::tuple_size_v<Result>>());
  }
}

// What `model.forward` gives of these. `call`: forward(), of this model or of
// what is around it.
template <typename Model, typename Call, size_t... I>
bool call_with(Model& model, const Call& call, const Tensors& inputs,
               Tensors& outputs, std::index_sequence<I...> /*each*/) {
  if (inputs.size() != sizeof...(I)) return false;
  if constexpr (requires { model.forward(inputs[I]...); }) {
    outputs = tensors_of(call(inputs[I]...));
    return true;
  } else {
    return false;
  }
}

template <typename Model, typename Call>
Tensors call_forward(Model& model, const Call& call, const Tensors& inputs) {
  Tensors outputs;
  const bool is_called = [&]<size_t... N>(std::index_sequence<N...> /*each*/) {
    return (call_with(model, call, inputs, outputs,
                      std::make_index_sequence<N + 1>()) ||
            ...);
  }(std::make_index_sequence<kMostTensors>());
  if (is_called) return outputs;
  if constexpr (requires { model.forward(inputs); }) {
    return tensors_of(call(inputs));
  }
  TS_CHECK(false, "pipeline: a stage is given ", inputs.size(),
           " tensors, which its forward() does not take. What a stage gives "
           "(a tensor, a tuple, a vector) is what the next one's forward() "
           "takes.");
}

}  // namespace tessera::wrappers
