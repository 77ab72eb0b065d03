// A mapping of shared memory that ends with its owner.
#pragma once

#include <sys/mman.h>

#include <cstddef>

namespace tessera::comm::shm {

class Mapping {
 public:
  Mapping() = default;
  ~Mapping() {
    if (base_ != nullptr) munmap(base_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  // False, with errno, where the system refuses.
  bool map(int fd, size_t bytes) {
    void* address =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) return false;
    base_ = static_cast<char*>(address);
    bytes_ = bytes;
    return true;
  }
  char* base() const { return base_; }
  size_t bytes() const { return bytes_; }

 private:
  char* base_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace tessera::comm::shm
