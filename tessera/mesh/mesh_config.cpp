#include "tessera/mesh/mesh_config.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string_view>

#include "tessera/core/error.h"

namespace tessera::mesh {
namespace {

constexpr int64_t kMaxDegree = int64_t{1} << 20;
constexpr double kMostTimesAsFast = 1e6;

std::string complaint_about_order(const config::Value& value) {
  const auto& names = std::get<std::vector<std::string>>(value);
  for (Axis axis : kAxes) {
    const auto times = std::count(names.begin(), names.end(), name_of(axis));
    if (times != 1) {
      return c10::str("it must name every axis once, and has \"", name_of(axis),
                      times == 0 ? "\" nowhere" : "\" more than once",
                      ". The axes are ", names_of_axes());
    }
  }
  return names.size() == kAxes.size()
             ? ""
             : "it names more than the axes " + names_of_axes();
}

std::string complaint_about_speeds(const config::Value& value) {
  const auto& speeds = std::get<std::vector<double>>(value);
  const bool are_speeds = std::ranges::all_of(
      speeds, [](double each) { return std::isfinite(each) && each > 0; });
  if (!are_speeds) return "each is a number above 0, and finite";
  if (speeds.empty()) return "";
  const auto [slowest, fastest] = std::ranges::minmax(speeds);
  return fastest / slowest <= kMostTimesAsFast
             ? ""
             : "the fastest is more than a million times as fast as the "
               "slowest, which is no speed of a device";
}

struct DegreeKey {
  const char* name;
  int64_t MeshConfig::* member;
  int64_t minimum;
  const char* meaning;
};
// In the order of the manual; but for dp each has the name of its axis.
constexpr DegreeKey kDegreeKeys[] = {
    {"pp", &MeshConfig::pp, 1, "pipeline stages"},
    {"dp", &MeshConfig::dp, 0,
     "data-parallel ranks: dp_replicate with zero.stage 0, else dp_shard; "
     "0: what the world leaves"},
    {"dp_replicate", &MeshConfig::dp_replicate, 0,
     "data-parallel replicas; 0: what the world leaves"},
    {"dp_shard", &MeshConfig::dp_shard, 0,
     "ranks among which ZeRO shards the parameters; 0: what the world "
     "leaves, or 1 with zero.stage 0"},
    {"cp", &MeshConfig::cp, 1, "ranks among which a sequence is cut"},
    {"tp", &MeshConfig::tp, 1, "ranks among which a layer is cut"},
    {"ep", &MeshConfig::ep, 1,
     "ranks among which experts are shared out; no further factor of the "
     "world"},
    {"etp", &MeshConfig::etp, 1,
     "ranks among which an expert is cut: 1 or tp"}};

// Null where it follows from other keys.
int64_t MeshConfig::* key_of(Axis axis) {
  for (const DegreeKey& key : kDegreeKeys) {
    if (name_of(axis) == std::string_view(key.name)) return key.member;
  }
  return nullptr;
}

int64_t MeshConfig::* member_of(Axis axis) {
  const auto member = key_of(axis);
  TORCH_INTERNAL_ASSERT(member, "mesh.", name_of(axis), " is no key");
  return member;
}

}  // namespace

void MeshConfig::declare(config::Section& section) {
  for (const DegreeKey& key : kDegreeKeys) {
    section.key(key.name, this->*key.member, key.meaning)
        .at_least(static_cast<double>(key.minimum))
        .at_most(kMaxDegree);
  }
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
           "relative speed of each rank, by which layers and samples are "
           "shared out; none: all alike")
      .check(complaint_about_speeds);
  section.key("measure_speeds", measure_speeds,
              "ranks measure at the start how fast they are, in place of "
              "speeds");
}

int64_t& MeshConfig::degree(Axis axis) { return this->*member_of(axis); }

int64_t MeshConfig::degree(Axis axis) const { return this->*member_of(axis); }

bool differ(const std::vector<double>& speeds) {
  return std::ranges::adjacent_find(speeds, std::not_equal_to<>()) !=
         speeds.end();
}

int64_t MeshConfig::ranks_of_model() const {
  int64_t product = 1;
  for (Axis axis : kAxes) {
    if (!is_of_data(axis)) product *= std::max<int64_t>(degree(axis), 1);
  }
  return product;
}

std::vector<std::string> keys_of_degrees() {
  std::vector<std::string> keys;
  for (const DegreeKey& key : kDegreeKeys) {
    keys.push_back(std::string("mesh.") + key.name);
  }
  return keys;
}

Degrees MeshConfig::degrees(int64_t world_size, int64_t zero_stage) const {
  const int64_t total =
      dp > 0 ? dp : std::max<int64_t>(world_size / ranks_of_model(), 1);
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
  Degrees degrees;
  for (size_t i = 0; i < kNumAxes; ++i) {
    const auto axis = static_cast<Axis>(i);
    const auto key = key_of(axis);
    if (key) degrees.*entry_of(axis).degree = this->*key;
  }
  degrees.dp_replicate = replicate;
  degrees.dp_shard = shard;
  return degrees;
}

DeviceMesh MeshConfig::mesh(int64_t world_size, int64_t zero_stage,
                            bool experts_by_replica) const {
  std::vector<Axis> axes;
  for (const auto& name : order) axes.push_back(axis_named(name));
  Degrees all = degrees(world_size, zero_stage);
  if (experts_by_replica) all.expert_replicate = all.dp_replicate;
  return DeviceMesh(all, world_size, axes);
}

}  // namespace tessera::mesh
