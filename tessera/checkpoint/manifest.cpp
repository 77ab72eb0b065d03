#include "tessera/checkpoint/manifest.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>
#include <set>
#include <sstream>
#include <tuple>

#include "tessera/checkpoint/detail/file_hash.h"
#include "tessera/checkpoint/detail/step_folders.h"
#include "tessera/core/crc32c.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::checkpoint {

namespace fs = std::filesystem;
using tessera::detail::in_quotes;

namespace {

constexpr const char* kResumedFrom = "/resumed-from";

// "step-10 2": a run went back to step 10 when commit 2 was the newest.
struct Resumed {
  std::string name;
  int64_t sequence = -1;
};

Resumed read_resumed(const std::string& folder) {
  const std::string path = folder + kResumedFrom;
  if (!fs::exists(path)) return {};
  Resumed resumed;
  std::istringstream text(read_file(path));
  std::string rest;
  TS_CHECK_IO(text >> resumed.name >> resumed.sequence && !(text >> rest) &&
                  detail::step_of_name(resumed.name),
              path,
              ": must be a checkpoint and the commit that was the newest when "
              "a run went back to it, as \"step-10 2\". Without this file, "
              "what was saved last is the newest.");
  return resumed;
}

}  // namespace

int64_t Manifest::bytes() const {
  int64_t sum = 0;
  for (const SavedFile& file : files) sum += file.bytes;
  return sum;
}

const TensorSpec* Manifest::find(const std::string& name) const {
  const auto found =
      std::ranges::lower_bound(tensors, name, {}, &TensorSpec::name);
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

std::string shard_name(int64_t rank) {
  std::string number = std::to_string(rank + 1);
  number.insert(0, number.size() < 5 ? 5 - number.size() : 0, '0');
  return "shard-" + number + "-model-00001-of-00001.safetensors";
}

void check_coverage(const Manifest& manifest, const std::string& source) {
  std::vector<std::vector<const mesh::Box*>> boxes(manifest.tensors.size());
  for (const SavedFile& file : manifest.files) {
    for (const SavedBox& saved : file.boxes) {
      boxes[saved.tensor].push_back(&saved.box);
    }
  }
  for (size_t i = 0; i < boxes.size(); ++i) {
    const TensorSpec& tensor = manifest.tensors[i];
    auto& of_tensor = boxes[i];
    std::ranges::sort(of_tensor, {}, &mesh::Box::offset);
    int64_t covered = 0;
    for (size_t a = 0; a < of_tensor.size(); ++a) {
      covered += of_tensor[a]->numel();
      // Sorted by dim 0: only boxes that begin before this one ends can meet.
      for (size_t b = a + 1; b < of_tensor.size(); ++b) {
        const mesh::Box& box = *of_tensor[a];
        if (!box.offset.empty() &&
            of_tensor[b]->offset[0] >= box.offset[0] + box.size[0]) {
          break;
        }
        TS_CHECK_IO(mesh::intersect(box, *of_tensor[b]).empty(), source,
                    ": tensor ", in_quotes(tensor.name),
                    " has parts that overlap, at offsets ",
                    at::IntArrayRef(box.offset), " and ",
                    at::IntArrayRef(of_tensor[b]->offset));
      }
    }
    const int64_t whole =
        tensor.bytes() / static_cast<int64_t>(c10::elementSize(tensor.dtype));
    TS_CHECK_IO(covered == whole, source, ": tensor ", in_quotes(tensor.name),
                " has ", covered, " of its ", whole, " elements");
  }
}

Manifest read_manifest_alone(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  Manifest manifest = parse_manifest(read_file(path, kMaxManifestBytes), path);
  check_coverage(manifest, path);
  const auto step = detail::step_of_name(detail::last_part(folder));
  TS_CHECK_IO(!step || *step == manifest.step, path, ": is of step ",
              manifest.step, ", but lies in ", folder);
  return manifest;
}

Manifest read_manifest(const std::string& folder) {
  Manifest manifest = read_manifest_alone(folder);
  std::set<std::string> expected = {kManifestName};
  for (const SavedFile& file : manifest.files) expected.insert(file.name);
  for (const auto& entry : fs::directory_iterator(folder)) {
    TS_CHECK_IO(expected.erase(entry.path().filename().string()) == 1,
                entry.path().string(),
                ": is not listed in the manifest. Remove it, if nothing else "
                "was changed.");
  }
  TS_CHECK_IO(expected.empty(), folder, "/", *expected.begin(),
              ": is missing; the manifest lists it");
  return manifest;
}

std::vector<StepFolder> list_checkpoints(const std::string& folder) {
  std::vector<StepFolder> steps;
  if (!fs::exists(folder)) return steps;
  const Resumed resumed = read_resumed(folder);
  const auto was_resumed = [&](const StepFolder& found) {
    return detail::step_name(found.step) == resumed.name &&
           found.sequence <= resumed.sequence;
  };
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto step = detail::step_of_name(entry.path().filename());
    if (!step) continue;
    StepFolder found{*step, std::numeric_limits<int64_t>::max(), ""};
    try {
      found.sequence = read_manifest(entry.path().string()).sequence;
      if (was_resumed(found)) found.sequence = resumed.sequence;
    } catch (const Error& error) {
      found.complaint = error.what_without_backtrace();
    } catch (const fs::filesystem_error& error) {
      found.complaint = error.what();
    }
    steps.push_back(found);
  }
  std::ranges::sort(steps, std::greater{}, [&](const StepFolder& found) {
    return std::tuple(found.sequence, was_resumed(found), found.step);
  });
  return steps;
}

std::optional<StepFolder> newest_checkpoint(const std::string& folder) {
  const auto all = list_checkpoints(folder);
  const auto found = std::ranges::find_if(
      all, [](const StepFolder& each) { return each.complaint.empty(); });
  return found == all.end() ? std::nullopt : std::optional(*found);
}

int64_t newest_commit(const std::string& folder) {
  const auto newest = newest_checkpoint(folder);
  return newest ? newest->sequence : -1;
}

bool has_checkpoints(const std::string& folder) {
  std::error_code none;
  return std::ranges::any_of(
      fs::directory_iterator(folder, none), [](const auto& entry) {
        return detail::step_of_name(entry.path().filename()).has_value();
      });
}

bool is_of_checkpoints(const std::string& name) {
  return detail::step_of_name(name).has_value() || detail::is_leftover(name);
}

void go_back_to(const std::string& folder, int64_t step) {
  const std::string name = detail::step_name(step);
  const auto newest = newest_checkpoint(folder);
  if (!newest || newest->step == step) return;
  write_file_atomic(folder + kResumedFrom,
                    c10::str(name, " ", newest->sequence, "\n"));
  detail::name_latest(folder, step);
}

std::string step_folder(const std::string& folder, int64_t step) {
  return folder + "/" + detail::step_name(step);
}

bool is_checkpoint_in(const std::string& folder, const std::string& path) {
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder, none)) {
    if (!detail::step_of_name(entry.path().filename())) continue;
    if (fs::equivalent(entry.path() / kManifestName,
                       fs::path(path) / kManifestName, none)) {
      return true;
    }
  }
  return false;
}

void verify_file(const std::string& folder, const Manifest& manifest,
                 const SavedFile& file) {
  const std::string path = folder + "/" + file.name;
  const PartsOfFile parts{fs::path(path)};
  const auto size = static_cast<int64_t>(parts.size());
  detail::FileHash hash;
  std::vector<std::byte> bytes;
  const auto differs = [&](int64_t begin, int64_t end, uint32_t expected) {
    bytes.resize(end - begin);
    parts.read(begin, bytes);
    hash.update(bytes.data(), bytes.size());
    return crc32c(bytes) != expected;
  };
  TS_CHECK_IO(size >= file.header_bytes, path, ": has ", size, " of ",
              file.bytes, " bytes: truncated in its header");
  TS_CHECK_IO(!differs(0, file.header_bytes, file.header_crc32c), path,
              ": the checksum of its header differs (bytes 0 to ",
              file.header_bytes, ")");
  for (const SavedBox& saved : file.boxes) {
    const auto& sums = saved.sums;
    const std::string where = path + ": tensor " + in_quotes(sums.name);
    TS_CHECK_IO(sums.end <= size, where, " lies at bytes ", sums.begin, " to ",
                sums.end, ", but the file has ", size, " of ", file.bytes,
                " bytes: truncated");
    for (size_t block = 0; block < sums.blocks.size(); ++block) {
      const int64_t begin =
          sums.begin + static_cast<int64_t>(block) * kChecksumBlockBytes;
      const int64_t end = std::min(begin + kChecksumBlockBytes, sums.end);
      TS_CHECK_IO(!differs(begin, end, sums.blocks[block]), where,
                  ": the checksum differs in bytes ", begin, " to ", end,
                  " of the file");
    }
  }
  TS_CHECK_IO(size == file.bytes, path, ": has ", size, " bytes, not ",
              file.bytes);
  TS_CHECK_IO(hash.digest() == file.hash, path, ": has XXH3 ",
              to_hex(hash.digest()), ", not ", to_hex(file.hash));
}

}  // namespace tessera::checkpoint
