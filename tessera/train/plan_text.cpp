#include "tessera/train/plan_text.h"

#include <c10/util/StringUtil.h>

#include <sstream>
#include <vector>

#include "tessera/core/units.h"
#include "tessera/engine/cut_text.h"
#include "tessera/engine/memory_plan.h"
#include "tessera/models/model.h"
#include "tessera/train/memory_check.h"

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
  for (Axis axis : mesh::kExpertAxes) {
    if (axis != Axis::kPp) axis_line(axis);
  }
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
         mesh.peers(holders[i], {Axis::kPp, Axis::kExpertReplicate,
                                 Axis::kExpertDp, Axis::kEtp})) {
      ranks.push_back(std::to_string(peer));
    }
    line("experts", std::to_string(first) + "-" +
                        std::to_string(first + each - 1) + " on ranks " +
                        some_of(ranks, kNamedAtMost));
  }
  return text;
}

std::string batch_text(const RunConfig& config) {
  const int64_t degree = data_parallel_degree(config);
  const int64_t count = accumulation(config);
  const std::string whole = c10::str(config.batch.global, " samples = ");
  return has_uneven_batch(config)
             ? c10::str(whole, samples_of_microbatch(config),
                        " on data-parallel degree ", degree, " x accumulation ",
                        count)
             : c10::str(whole, "micro ", config.batch.micro, " x accumulation ",
                        count, " x data-parallel degree ", degree);
}

std::string shares_line(const RunConfig& config) {
  const std::string shares = engine::shares_text(config);
  return shares.empty() ? "" : "            " + shares + "\n";
}

}  // namespace

std::string plan_text(const RunConfig& config) {
  const auto mesh = mesh_of(config, implied_world_size(config));
  RunConfig here = config;  // all ranks on this host
  here.resolve(share_memory(config, {.first = 0, .count = mesh.world_size()}));
  const auto memory = engine::memory_plan(here);
  std::ostringstream text;
  text << "model       " << models::describe(config.model) << "\n"
       << "mesh        " << mesh.describe() << "\n"
       << groups_text(config, mesh) << engine::stages_lines(config)
       << "batch       " << batch_text(config) << "; "
       << count_text(config.batch.global * config.data.seq_len)
       << " tokens a step\n"
       << shares_line(config) << "memory      " << bytes_text(memory.states)
       << " of model states and at most " << bytes_text(memory.work)
       << " of activations on the fullest rank\n";
  if (memory.in_files > 0) {
    text << "files       " << bytes_text(memory.in_files)
         << " of its states lie in " << engine::offload_folder(config) << "\n";
  }
  text << "checkpoint  " << bytes_text(checkpoint_bytes(config));
  if (memory.copies > 0) {
    text << ", of which the fullest rank copies at most "
         << bytes_text(memory.copies) << " into memory";
  }
  text << "\n";
  if (config.checkpoint.saves_locally()) {
    text << "local       at most " << bytes_text(memory.saved)
         << " of it from the fullest rank in " << config.checkpoint.local_dir
         << ", twice while the next one is written, and a copy on the next "
            "host where there is one\n";
  }
  return text.str();
}

}  // namespace tessera::train
