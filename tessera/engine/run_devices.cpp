#include "tessera/engine/run_devices.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <utility>

#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tessera/nn/fp8_product.h"
#include "tessera/nn/gpu/program.h"

namespace tessera::engine {
namespace {

// "cuda,cpu": {"cuda", "cpu"}.
std::vector<std::string> devices_in(const std::string& text) {
  std::vector<std::string> names;
  std::istringstream list(text + ",");
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names;
}

}  // namespace

std::string complaint_about_devices(const config::Value& value) {
  constexpr std::array kNames = {"auto", "cpu", "cuda"};
  for (const auto& name : devices_in(std::get<std::string>(value))) {
    if (std::ranges::find(kNames, name) == kNames.end()) {
      return "\"" + name + "\" is none of auto, cpu, cuda";
    }
  }
  return "";
}

std::optional<NotOnGpus> why_not_on_gpus(const RunConfig& config) {
  if (config.mesh.star()) return {{"mesh.data_parallel is dp", "ddp"}};
  if (!config.zero.offloads_parameters()) return std::nullopt;
  // What lies in files is the host's: a GPU has what is gathered from there.
  const bool has_experts = config.model.moe.experts > 0;
  const int64_t of_experts = has_experts ? config.zero.stage_of_experts() : 3;
  for (const auto& [key, stage] : {std::pair{"zero.stage", config.zero.stage},
                                   {"zero.expert_stage", of_experts}}) {
    if (stage == 3) continue;
    return {{c10::str("zero.offload is all with ", key, " ", stage),
             "3 there, with which weights are brought to a GPU for each use, "
             "or zero.offload optimizer or none"}};
  }
  return std::nullopt;
}

void find_devices(RunConfig& config, int64_t stages) {
  auto& types = config.run.device_types;
  types.clear();
  for (std::string name : devices_in(config.run.device)) {
    if (name == "auto") {
      name = num_gpus() > 0 && !why_not_on_gpus(config) ? "cuda" : "cpu";
    }
    types.push_back(device_type_of(name));
  }
  const auto given = static_cast<int64_t>(types.size());
  TS_CHECK_CONFIG(given == 1 || given == stages, "run.device is ",
                  config.run.device, ", for ", given,
                  " stages, but mesh.pp is ", stages,
                  ". Give one for all ranks, or one for each stage.");
}

c10::DeviceType device_of_rank(const RunConfig& config, int64_t rank) {
  const auto& run = config.run;
  if (run.device_types.size() == 1) return run.device_types.front();
  const auto mesh = mesh_of(config, implied_world_size(config));
  return run.device_of_stage(mesh.coord_of(rank)[mesh::Axis::kPp]);
}

std::vector<c10::DeviceType> devices_of_ranks(const RunConfig& config,
                                              int64_t world_size) {
  std::vector<c10::DeviceType> devices;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    devices.push_back(device_of_rank(config, rank));
  }
  return devices;
}

void check_device(const RunConfig& config) {
  if (config.run.is_on_cpu()) return;
  if (const auto found = why_not_on_gpus(config)) {
    TS_CHECK_CONFIG(false, found->what, ", which no GPU is built for. Use ",
                    found->instead, ", or run.device cpu.");
  }
  TS_CHECK_CONFIG(config.monitor.reruns == 0, "monitor.reruns is ",
                  config.monitor.reruns, ", but run.device is ",
                  config.run.device_text(),
                  ": a GPU's kernels, as of attention's backward, add up in "
                  "any order, and differ without an error. Use 0, and "
                  "monitor.replicas, or run.device cpu.");
  if (config.precision.is_fp8() && num_gpus() > 0) {
    check_products(config, nn::gpu::least_capability());
  }
}

void check_products(const RunConfig& config, int capability) {
  TS_CHECK_CONFIG(
      !config.precision.is_fp8() || capability >= nn::kLeastFp8Capability,
      "precision.products is fp8, but a GPU of this host has "
      "compute capability ",
      capability / 10, ".", capability % 10,
      ": 8.9 and later ones multiply it. Use precision.products "
      "same, or run.device cpu, which emulates it.");
}

std::string emulation_text(const RunConfig& config) {
  const bool emulates =
      config.precision.is_fp8() &&
      std::ranges::count(config.run.device_types, c10::kCPU) > 0;
  return emulates ? "precision.products fp8 is emulated on the CPU: its "
                    "products are those of the rounded numbers, in fp32, and "
                    "slower than bf16's"
                  : "";
}

}  // namespace tessera::engine
