#include "tessera/train/preflight.h"

#include <sstream>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/core/units.h"
#include "tessera/data/file_list.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/models/model.h"
#include "tessera/train/data_setup.h"
#include "tessera/train/run_folder.h"

namespace tessera::train {

using engine::RunConfig;

namespace {

// A line for each axis along which there is more than one rank, and where the
// experts are.
std::string groups_text(const RunConfig& config, const mesh::DeviceMesh& mesh) {
  using mesh::Axis;
  std::string text;
  const auto line = [&](const std::string& name, const std::string& groups) {
    text += std::string(text.empty() ? "groups      " : "            ") + name +
            " " + groups + "\n";
  };
  const auto axis_line = [&](Axis axis) {
    if (mesh.degree(axis) == 1) return;
    line(mesh::name_of(axis), mesh.describe_groups(axis));
  };
  for (Axis axis : mesh.order()) axis_line(axis);
  const int64_t experts = config.model.moe.experts;
  if (experts == 0) return text;
  for (Axis axis : {Axis::kExpertDp, Axis::kEp, Axis::kEtp}) axis_line(axis);
  if (mesh.degree(Axis::kEp) == 1) return text;
  const int64_t each = experts / mesh.degree(Axis::kEp);
  constexpr size_t kNamedAtMost = 16;  // ranks, and lines
  const auto holders = mesh.peers(0, {Axis::kEp});
  for (size_t i = 0; i < holders.size(); ++i) {
    if (i == kNamedAtMost) {
      line("experts", "... on the other ranks");
      break;
    }
    const int64_t first = mesh.coord_of(holders[i])[Axis::kEp] * each;
    std::vector<std::string> ranks;
    for (int64_t peer :
         mesh.peers(holders[i], {Axis::kPp, Axis::kExpertDp, Axis::kEtp})) {
      ranks.push_back(std::to_string(peer));
    }
    line("experts", std::to_string(first) + "-" +
                        std::to_string(first + each - 1) + " on ranks " +
                        some_of(ranks, kNamedAtMost));
  }
  return text;
}

}  // namespace

void preflight(const RunConfig& config) {
  check_paths(config);
  const RunFolder folder(config);
  folder.create();
  prepare_data(config, folder);
  if (config.checkpoint.every > 0) {
    checkpoint::require_space(folder.checkpoints(), checkpoint_bytes(config),
                              config.checkpoint.keep);
  }
}

void check_paths(const RunConfig& config) {
  data::expand_paths(config.data.train, "data.train");
  if (!config.data.valid.empty()) {
    data::expand_paths(config.data.valid, "data.valid");
  }
  comm::check_tuning_table();
}

std::string describe_plan(const RunConfig& config) {
  const int64_t parameters = models::num_parameters(config.model);
  const auto mesh =
      config.mesh.mesh(implied_world_size(config), config.zero.stage);
  const auto memory = engine::memory_plan(config);
  std::ostringstream text;
  text << "model       " << config.model.family << ", "
       << count_text(parameters) << " parameters\n"
       << "mesh        " << mesh.describe() << "\n"
       << groups_text(config, mesh) << "batch       " << config.batch.global
       << " samples = micro " << config.batch.micro << " x accumulation "
       << accumulation(config) << " x data-parallel degree "
       << data_parallel_degree(config) << "; "
       << count_text(config.batch.global * config.data.seq_len)
       << " tokens a step\n"
       << "memory      " << bytes_text(memory.states)
       << " of model states and at most " << bytes_text(memory.work)
       << " of activations on the fullest rank\n"
       << "checkpoint  " << bytes_text(checkpoint_bytes(config)) << "\n";
  return text.str();
}

}  // namespace tessera::train
