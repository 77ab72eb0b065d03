// Samples that are held out for validation, spread evenly over the data.
//
// Of `size` samples `held` are held out; both kinds keep their order, and which
// is which is arithmetic: nothing is stored, and no seed moves it.
#pragma once

#include <cstdint>

namespace tessera::data {

class HoldOut {
 public:
  // REQUIRES: 0 <= held < size.
  HoldOut(int64_t size, int64_t held) : size_(size), held_(held) {}

  int64_t num_kept() const { return size_ - held_; }
  int64_t num_held() const { return held_; }
  // The i-th of each kind.
  int64_t kept(int64_t i) const { return scaled(i, size_ - held_, 0); }
  int64_t held(int64_t i) const { return scaled(i + 1, held_, held_ - 1) - 1; }

 private:
  // (i * size + more) / by, which may take more than 64 bits on the way.
  int64_t scaled(int64_t i, int64_t by, int64_t more) const {
    __extension__ using Wide = __int128;
    return static_cast<int64_t>((static_cast<Wide>(i) * size_ + more) / by);
  }

  int64_t size_, held_;
};

}  // namespace tessera::data
