#include "tessera/comm/nccl/gpus.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>

namespace tessera::comm::nccl {
namespace {

constexpr const char* kWayOut =
    "use comm.backend auto, which goes through the host then.";

}  // namespace

std::string against_devices(const std::vector<c10::DeviceType>& devices) {
  const auto other = std::ranges::find_if(
      devices, [](c10::DeviceType type) { return type != c10::kCUDA; });
  if (!devices.empty() && other == devices.end()) return "";
  const auto type = devices.empty() ? c10::kCPU : *other;
  return c10::str(
      "it carries tensors of GPUs alone, but rank ", other - devices.begin(),
      " computes on ", c10::DeviceTypeName(type, /*lower_case=*/true),
      ". Where all ranks train on cuda (run.device) it does; else ", kWayOut);
}

std::string against_sharing(const std::vector<std::string>& gpus) {
  std::map<std::string, size_t> first;
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    const auto [found, is_new] = first.emplace(gpus[rank], rank);
    if (is_new) continue;
    return c10::str("it needs a GPU for each rank, but ranks ", found->second,
                    " and ", rank, " share ", gpus[rank],
                    ". Start fewer ranks, or ", kWayOut);
  }
  return "";
}

}  // namespace tessera::comm::nccl
