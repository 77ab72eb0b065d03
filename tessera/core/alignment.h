// Where tensors start in a buffer that holds many.
#pragma once

#include <cstdint>

namespace tessera {

// In elements: a cache line of fp32.
inline constexpr int64_t kFlatAlignment = 16;

}  // namespace tessera
