// What gradients are multiplied by, so that their norm is `most` at most.
#pragma once

#include "tessera/optim/gradient_norm.h"

namespace tessera::wrappers {

// Of a `most` of 0 none is left, as torch has it; to optim::clip_scale() it
// means not to clip.
inline double scale_within(double norm, double most) {
  return most == 0.0 ? 0.0 : optim::clip_scale(norm, most);
}

}  // namespace tessera::wrappers
