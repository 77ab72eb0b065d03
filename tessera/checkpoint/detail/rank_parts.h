// A checkpoint is made of the ranks' parts: each writes a file of its own, and
// one manifest lists them all.
//
// Errors: TS_CHECK_IO with file and tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/detail/local_steps.h"
#include "tessera/checkpoint/manifest.h"

namespace tessera::checkpoint::detail {

// REQUIRES: a name once, and local tensors of their boxes' sizes.
void check_entries(const State& state);

// Whether this rank's file holds it.
bool is_written(const TensorEntry& entry);
// Of the tensors in this rank's file.
int64_t bytes_written(const State& state);

// Writes this rank's file into `folder`, if it owns anything. Returns a
// manifest of it alone. `values_of` is asked for each tensor just before it is
// written: it may read them then, and throws to give the file up.
Manifest write_part(
    const std::string& folder, const State& state, int64_t rank,
    const std::function<at::Tensor(const TensorEntry&)>& values_of);

// The manifest of all ranks' parts, each as format_manifest() has it, that
// comes behind `base`. Step and the like: of `head`, which has no files.
// `source` is named in errors.
Manifest manifest_of(const std::vector<std::string>& parts, const Base& base,
                     Manifest head, const std::string& source);
// The same, on the disk in `folder`, where the parts' files are.
void write_manifest(const std::vector<std::string>& parts, const Base& base,
                    Manifest head, const std::string& folder);

// Nobody may hold a tensor that nobody saved.
void check_listed(const Manifest& manifest, const std::string& source,
                  const State& state);

}  // namespace tessera::checkpoint::detail
