// The manifest of a checkpoint: what lies in the folder, and its checksums.
//
// manifest.json is written last, so that a folder with one is whole; it is
// itself sealed by a CRC32C on its last line. docs/formats/checkpoint.md has
// the form.
// Units:  offsets in files in bytes, boxes in elements.
// Errors: TS_CHECK_IO; they name the file, the tensor and what is wrong.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/mesh/layout.h"

namespace tessera::checkpoint {

inline constexpr int64_t kManifestVersion = 1;
inline constexpr size_t kMaxManifestBytes = size_t{1} << 30;
inline constexpr const char* kManifestName = "manifest.json";

// One rank's part of a tensor, in its file.
struct SavedBox {
  size_t tensor = 0;  // index into Manifest::tensors
  mesh::Box box;
  TensorSums sums;
};

struct SavedFile {
  std::string name;
  int64_t bytes = 0;
  int64_t header_bytes = 0;
  uint32_t header_crc32c = 0;
  Hash128 hash;
  std::vector<SavedBox> boxes;  // in the order of their bytes
};

struct Manifest {
  int64_t step = 0;
  int64_t sequence = 0;           // counts the commits in this folder
  std::optional<int64_t> parent;  // step of the commit before; none at first
  int64_t world_size = 1;
  std::string mesh;                 // as text, for people
  std::string extra;                // the caller's: JSON
  std::vector<TensorSpec> tensors;  // global shapes, by name
  std::vector<SavedFile> files;

  int64_t bytes() const;  // of all files
  // nullptr where there is none of that name.
  const TensorSpec* find(const std::string& name) const;
};

std::string format_manifest(const Manifest& manifest);
// Checks that boxes lie within their tensors and their files, and that files
// have names of this format.
Manifest parse_manifest(const std::string& text, const std::string& source);

// Of the checkpoint DIR/step-N. Also refuses one whose step is not N, whose
// boxes do not cover every tensor exactly once, or whose folder has an entry
// that the manifest does not list, or lacks one.
Manifest read_manifest(const std::string& folder);

// The same, but for the other entries of the folder: of a checkpoint of which
// only some files are there.
Manifest read_manifest_alone(const std::string& folder);

// A folder DIR/step-N.
struct StepFolder {
  int64_t step = 0;
  // Of the manifest, or of the newest one when a run went back to this; the
  // largest number if unreadable.
  int64_t sequence = 0;
  std::string complaint;  // why the manifest is unreadable; else ""
};

// Those in DIR, by their manifests alone: newest commit first, unreadable ones
// before all others. Empty where DIR is missing. One that a run went back to
// counts as committed then.
std::vector<StepFolder> list_checkpoints(const std::string& folder);

// The first of them that can be read.
std::optional<StepFolder> newest_checkpoint(const std::string& folder);
// Its sequence; -1: there is none.
int64_t newest_commit(const std::string& folder);

// Whether DIR has a step-N, by names alone: what was set aside under another
// one, as step-20.bak, is none. DIR may be missing.
bool has_checkpoints(const std::string& folder);

// Whether an entry of DIR with that name is one to a run: a step-N, or what its
// next save removes.
bool is_of_checkpoints(const std::string& name);

// A run goes on from DIR/step-N, which is not the newest: DIR/resumed-from says
// so, and DIR/latest. What was saved behind it is another branch from then on.
void go_back_to(const std::string& folder, int64_t step);

// DIR/step-N.
std::string step_folder(const std::string& folder, int64_t step);

// Whether `path` is one of the checkpoints in `folder`, which may be links as
// `path` may.
bool is_checkpoint_in(const std::string& folder, const std::string& path);

// Reads every byte of the file, and compares it with the manifest.
void verify_file(const std::string& folder, const Manifest& manifest,
                 const SavedFile& file);

// "shard-00003-model-00001-of-00001.safetensors" of rank 2.
std::string shard_name(int64_t rank);

// Throws unless the boxes of every tensor cover it exactly once.
void check_coverage(const Manifest& manifest, const std::string& source);

}  // namespace tessera::checkpoint
