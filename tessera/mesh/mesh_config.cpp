#include "tessera/mesh/mesh_config.h"

#include "tessera/core/error.h"

namespace tessera::mesh {
namespace {

constexpr int64_t kMaxDegree = int64_t{1} << 20;

std::string complaint_about_order(const config::Value& value) {
  const auto& names = std::get<std::vector<std::string>>(value);
  for (Axis axis : kAxes) {
    if (std::count(names.begin(), names.end(), name_of(axis)) != 1) {
      return std::string("it must name every axis once, and has not \"") +
             name_of(axis) +
             "\". The axes are pp, dp_replicate, dp_shard, cp, tp";
    }
  }
  return names.size() == kAxes.size() ? "" : "it names more than the five axes";
}

}  // namespace

void MeshConfig::declare(config::Section& section) {
  const auto degree = [&](const char* name, int64_t& member, int64_t minimum,
                          const char* meaning) {
    return section.key(name, member, meaning)
        .at_least(static_cast<double>(minimum))
        .at_most(kMaxDegree);
  };
  degree("pp", pp, 1, "pipeline stages");
  degree("dp", dp, 0,
         "data-parallel ranks: dp_replicate with zero.stage 0, else dp_shard; "
         "0: what the world leaves");
  degree("dp_replicate", dp_replicate, 0,
         "data-parallel replicas; 0: what the world leaves");
  degree("dp_shard", dp_shard, 0,
         "ranks among which ZeRO shards the parameters; 0: what the world "
         "leaves, or 1 with zero.stage 0");
  degree("cp", cp, 1, "ranks among which a sequence is cut");
  degree("tp", tp, 1, "ranks among which a layer is cut");
  degree("ep", ep, 1,
         "ranks among which experts are shared out; no further factor of the "
         "world");
  degree("etp", etp, 1, "ranks among which an expert is cut: 1 or tp");
  section
      .key("order", order,
           "the axes from the outermost (slowest) to the innermost")
      .check(complaint_about_order);
  section
      .key("data_parallel", data_parallel,
           "ddp: every rank its own replica; dp: threads around device 0")
      .one_of({"ddp", "dp"});
  section
      .key("speeds", speeds,
           "relative speed of each rank, for uneven shares of work")
      .not_built("uneven shares of work");
}

Degrees MeshConfig::degrees(int64_t world_size, int64_t zero_stage) const {
  const int64_t others = pp * cp * tp;
  const int64_t total = dp > 0 ? dp : std::max<int64_t>(world_size / others, 1);
  int64_t replicate = dp_replicate, shard = dp_shard;
  if (shard == 0 && (zero_stage == 0 || replicate == 0)) {
    shard = zero_stage == 0 ? 1 : total;
  }
  if (shard == 0) shard = std::max<int64_t>(total / replicate, 1);
  if (replicate == 0) replicate = std::max<int64_t>(total / shard, 1);
  TS_CHECK_CONFIG(dp == 0 || dp == replicate * shard, "mesh.dp is ", dp,
                  ", but dp_replicate ", replicate, " x dp_shard ", shard,
                  " = ", replicate * shard,
                  ". Leave mesh.dp out, or the other two.");
  return {.pp = pp,
          .dp_replicate = replicate,
          .dp_shard = shard,
          .cp = cp,
          .tp = tp,
          .ep = ep,
          .etp = etp};
}

DeviceMesh MeshConfig::mesh(int64_t world_size, int64_t zero_stage) const {
  std::vector<Axis> axes;
  for (const auto& name : order) axes.push_back(axis_named(name));
  return DeviceMesh(degrees(world_size, zero_stage), world_size, axes);
}

}  // namespace tessera::mesh
