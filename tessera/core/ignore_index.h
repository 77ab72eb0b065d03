// The target that does not count in a cross-entropy, as in PyTorch.
#pragma once

#include <cstdint>

namespace tessera {

inline constexpr int64_t kIgnoreIndex = -100;

}  // namespace tessera
