// What a thread asks of a GPU, recorded to be asked of it again at once: a CUDA
// graph.
//
// Host:    what else the work does is done when it is recorded, and not again.
//          Numbers that it hands to the device are those of that time: what
//          changes lies in memory that the device reads.
// Memory:  what the work allocates is the graph's own from then on, held until
//          the graph ends; tensors of it that are kept hold what was computed
//          last.
// Errors:  record() throws what the work throws, and c10::Error where it waits
//          for the device or does what cannot be recorded; nothing is recorded
//          then.
// Threads: the one that records asks again, on the same stream.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace tessera {

class DeviceGraph {
 public:
  // Whether what is asked of such a device can be recorded here.
  static bool can_record(c10::Device device);

  DeviceGraph();
  ~DeviceGraph();
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  // REQUIRES: can_record(), and a stream that take_stream() gave. The device
  // does nothing of it yet.
  void record(const std::function<void()>& work);
  // REQUIRES: record() has returned.
  void repeat();

 private:
  struct Recorded;
  std::unique_ptr<Recorded> recorded_;
};

}  // namespace tessera
