// One thread a device, which lives as long as this object.
//
// Threads: run() is called by one thread at a time. A worker sees the caller's
//          grad mode and rank, and computes with its share of the caller's
//          intra-op threads (the count at construction over the devices).
// Errors:  the failure of the lowest device is thrown again by run(), with the
//          device named, when all have ended.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace tessera::wrappers {

class DeviceThreads {
 public:
  explicit DeviceThreads(std::vector<c10::Device> devices);
  ~DeviceThreads();
  DeviceThreads(const DeviceThreads&) = delete;
  DeviceThreads& operator=(const DeviceThreads&) = delete;

  // work(device) for each of the first `active` devices, all at once.
  void run(size_t active, const std::function<void(size_t device)>& work);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::wrappers
