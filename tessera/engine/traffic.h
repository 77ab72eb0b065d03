// What was communicated: bytes of a rank or device, and the seconds it took.
#pragma once

#include <cstdint>

namespace tessera::engine {

struct Traffic {
  double seconds = 0;
  int64_t bytes = 0;

  Traffic operator+(const Traffic& other) const {
    return {seconds + other.seconds, bytes + other.bytes};
  }
  Traffic operator-(const Traffic& other) const {
    return {seconds - other.seconds, bytes - other.bytes};
  }
};

}  // namespace tessera::engine
