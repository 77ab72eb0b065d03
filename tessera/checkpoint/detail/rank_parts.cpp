#include "tessera/checkpoint/detail/rank_parts.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "tessera/checkpoint/detail/posix_file.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::checkpoint::detail {
namespace {

using tessera::detail::Json;

TensorSpec part_of(const TensorEntry& entry) {
  return {entry.name, entry.local.scalar_type(), entry.box.size};
}

// What PyTorch's reader asks of a file: where each part lies in its tensor.
Metadata dcp_metadata(const std::vector<const TensorEntry*>& entries) {
  std::string info = "{";
  for (const TensorEntry* entry : entries) {
    if (info.size() > 1) info += ',';
    info += Json(entry->name).dump() +
            ":{\"saved_offsets\":" + Json(entry->box.offset).dump() + "}";
  }
  return {{"format", "pt"},
          {"DCP_VERSION", "1.0"},
          {"DCP_SHARDING_INFO", info + "}"}};
}

}  // namespace

// An empty part of a tensor is nothing to write, but a tensor without elements
// is still a tensor.
bool is_written(const TensorEntry& entry) {
  return entry.owned &&
         (!entry.box.empty() || entry.box.size == entry.global_shape);
}

int64_t bytes_written(const State& state) {
  int64_t sum = 0;
  for (const TensorEntry& entry : state.tensors) {
    if (is_written(entry)) sum += part_of(entry).bytes();
  }
  return sum;
}

void check_entries(const State& state) {
  std::set<std::string_view> names;
  for (const TensorEntry& entry : state.tensors) {
    TORCH_INTERNAL_ASSERT(names.insert(entry.name).second, "two entries ",
                          entry.name);
    TORCH_INTERNAL_ASSERT(
        entry.local.sizes() == entry.box.size &&
            entry.box.size.size() == entry.global_shape.size(),
        "entry ", entry.name, " of ", entry.local.sizes(), " is not its box");
  }
}

Manifest write_part(
    const std::string& folder, const State& state, int64_t rank,
    const std::function<at::Tensor(const TensorEntry&)>& values_of) {
  std::map<std::string, const TensorEntry*> by_name;
  std::vector<const TensorEntry*> entries;
  std::vector<TensorSpec> specs;
  for (const TensorEntry& entry : state.tensors) {
    if (!is_written(entry)) continue;
    by_name[entry.name] = &entry;
    entries.push_back(&entry);
    specs.push_back(part_of(entry));
  }
  Manifest part;
  if (entries.empty()) return part;
  FileSums sums = write_safetensors(
      folder + "/" + shard_name(rank), specs, dcp_metadata(entries),
      [&](const std::string& name) { return values_of(*by_name.at(name)); });

  for (const auto& [name, entry] : by_name) {
    part.tensors.push_back(
        {name, entry->local.scalar_type(), entry->global_shape});
  }
  SavedFile file{shard_name(rank),   sums.bytes, sums.header_bytes,
                 sums.header_crc32c, sums.hash,  {}};
  for (TensorSums& tensor : sums.tensors) {
    const auto found = by_name.find(tensor.name);
    const auto index =
        static_cast<size_t>(std::distance(by_name.begin(), found));
    file.boxes.push_back({index, found->second->box, std::move(tensor)});
  }
  part.files.push_back(std::move(file));
  return part;
}

Manifest manifest_of(const std::vector<std::string>& parts, const Base& base,
                     Manifest head, const std::string& source) {
  std::map<std::string, TensorSpec> tensors;
  Manifest whole = std::move(head);
  whole.world_size = std::ssize(parts);
  whole.sequence = base.sequence + 1;
  whole.parent = base.step;
  for (const std::string& text : parts) {
    const Manifest part = parse_manifest(text, source);
    for (const TensorSpec& tensor : part.tensors) {
      const auto [known, fresh] = tensors.emplace(tensor.name, tensor);
      TS_CHECK_IO(fresh || known->second == tensor, source, ": tensor \"",
                  tensor.name, "\" is ", describe(tensor), " on one rank and ",
                  describe(known->second), " on another");
    }
    std::ranges::copy(part.files, std::back_inserter(whole.files));
  }
  for (const auto& [name, tensor] : tensors) whole.tensors.push_back(tensor);
  for (SavedFile& file : whole.files) {
    for (SavedBox& box : file.boxes) {
      box.tensor = static_cast<size_t>(
          std::distance(tensors.begin(), tensors.find(box.sums.name)));
    }
  }
  return whole;
}

void write_manifest(const std::vector<std::string>& parts, const Base& base,
                    Manifest head, const std::string& folder) {
  const std::string text =
      format_manifest(manifest_of(parts, base, std::move(head), folder));
  NewFile file(folder + "/" + kManifestName);
  file.write(text.data(), text.size());
  file.close();
  sync_path(folder);
}

void check_listed(const Manifest& manifest, const std::string& source,
                  const State& state) {
  for (const TensorEntry& entry : state.tensors) {
    const TensorSpec here{entry.name, entry.local.scalar_type(),
                          entry.global_shape};
    const TensorSpec* saved = manifest.find(entry.name);
    TS_CHECK_IO(saved != nullptr, source, ": tensor \"", entry.name,
                "\" is owned by no rank");
    TS_CHECK_IO(*saved == here, source, ": tensor \"", entry.name, "\" is ",
                describe(*saved), " on its owner, ", describe(here), " here");
  }
}

}  // namespace tessera::checkpoint::detail
