// For backwards that are not recorded: loops of our own, and what else keeps
// no graph. With create_graph their gradients would be cut off from it, and a
// second derivative would be wrong in silence.
#pragma once

#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"

namespace tessera::nn::detail {

inline void refuse_second_derivatives(const char* what) {
  TS_CHECK(!at::GradMode::is_enabled(), what,
           " has no second derivative here: backward with create_graph is not "
           "to be had through it.");
}

}  // namespace tessera::nn::detail
