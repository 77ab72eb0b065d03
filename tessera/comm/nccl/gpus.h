// Whether ranks can go over NCCL: each has a GPU, and shares it with none.
#pragma once

#include <c10/core/DeviceType.h>

#include <string>
#include <vector>

namespace tessera::comm::nccl {

// What speaks against it, and the way out; "": nothing. What each rank computes
// on, empty: the CPU, all of them.
std::string against_devices(const std::vector<c10::DeviceType>& devices);
// By rank, a name that tells the GPUs of all hosts apart.
std::string against_sharing(const std::vector<std::string>& gpus);

}  // namespace tessera::comm::nccl
