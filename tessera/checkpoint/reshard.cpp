#include "tessera/checkpoint/reshard.h"

#include <ATen/Functions.h>

#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/detail/local_steps.h"
#include "tessera/checkpoint/detail/posix_file.h"
#include "tessera/checkpoint/detail/rank_parts.h"
#include "tessera/checkpoint/detail/step_folders.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

constexpr const char* kTrainedOn = "rewritten; trained on ";

// A scalar, or without elements: the first rank writes it.
bool is_of_one(const std::vector<int64_t>& shape) {
  return shape.empty() || mesh::Box::whole(shape).empty();
}

// Of a tensor of that shape, on one of so many ranks.
mesh::Box part_of(const std::vector<int64_t>& shape, int64_t ranks,
                  int64_t rank) {
  mesh::Box box = mesh::Box::whole(shape);
  if (is_of_one(shape)) return box;
  const mesh::Range rows = mesh::chunk_of(shape[0], ranks, rank);
  box.offset[0] = rows.begin;
  box.size[0] = rows.size();
  return box;
}

// Without a value of it.
State state_of(const Manifest& manifest, int64_t ranks, int64_t rank) {
  State state;
  for (const TensorSpec& tensor : manifest.tensors) {
    if (is_of_one(tensor.shape) && rank > 0) continue;
    state.tensors.push_back({.name = tensor.name,
                             .global_shape = tensor.shape,
                             .box = part_of(tensor.shape, ranks, rank),
                             .local = at::empty({0}, tensor.dtype)});
  }
  return state;
}

}  // namespace

int64_t reshard(const std::string& step_folder, const std::string& folder,
                int64_t ranks, const std::optional<std::string>& extra) {
  const Manifest manifest = read_manifest(step_folder);
  const TensorReader reader(step_folder, state_of(manifest, 1, 0));
  const std::string temporary =
      folder + "/" + detail::step_name(manifest.step) + ".tmp";
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TS_CHECK_IO(!error, folder, ": cannot be made: ", error.message(), ".");
  detail::remove_leftovers(folder);
  std::filesystem::create_directory(temporary, error);
  TS_CHECK_IO(!error, temporary, ": cannot be made: ", error.message(), ".");
  detail::require_room(folder, detail::bytes_written(state_of(manifest, 1, 0)));

  std::vector<std::string> parts;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    parts.push_back(format_manifest(
        detail::write_part(temporary, state_of(manifest, ranks, rank), rank,
                           [&](const TensorEntry& entry) {
                             return reader.read(entry.name, entry.box);
                           })));
  }
  std::string mesh = manifest.mesh;
  if (!mesh.starts_with(kTrainedOn)) mesh = kTrainedOn + mesh;
  detail::write_manifest(parts, detail::base_in(folder),
                         {.step = manifest.step,
                          .mesh = mesh,
                          .extra = extra.value_or(manifest.extra)},
                         temporary);
  detail::check_listed(read_manifest(temporary), temporary,
                       state_of(manifest, 1, 0));
  detail::commit_step(folder, temporary, manifest.step);
  detail::name_latest(folder, manifest.step);
  return manifest.step;
}

}  // namespace tessera::checkpoint
