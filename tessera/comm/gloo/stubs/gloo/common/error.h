// See ../../README.md.
#pragma once

#include <chrono>

namespace gloo {
constexpr std::chrono::milliseconds kNoTimeout =
    std::chrono::milliseconds::zero();
}  // namespace gloo
