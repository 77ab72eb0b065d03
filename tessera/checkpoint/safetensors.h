// safetensors files: read strictly, written durably.
//
// Form:   8 bytes little-endian header length, a JSON header, the tensors'
//         bytes without holes (https://github.com/huggingface/safetensors).
// Reader: refuses all that the Rust implementation refuses, and also duplicate
//         names, unknown fields, text before '{', and more tensors or metadata
//         than the limits below. Nothing is allocated by a size that was not
//         checked against the file. Names are names, never paths.
// Units:  offsets in bytes from the start of the file.
// Errors: TS_CHECK_IO; they name the file, the tensor and what is wrong.
// Threads: a SafetensorsFile is immutable: any number may read it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/hash.h"
#include "tessera/mesh/layout.h"

namespace tessera::checkpoint {

inline constexpr int64_t kMaxHeaderBytes = 100'000'000;  // as in Rust
inline constexpr int64_t kMaxTensorsPerFile = 1 << 18;
inline constexpr int64_t kMaxMetadataEntries = 1 << 16;
inline constexpr int64_t kMaxTensorDims = 64;

using Metadata = std::map<std::string, std::string>;

// What a tensor is, without its values.
struct TensorSpec {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;

  int64_t bytes() const;
  bool operator==(const TensorSpec&) const = default;
};

// The dtypes that are read and written.
inline constexpr std::string_view kDtypeNames =
    "one of F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL";
// Throws on a dtype that has no name here.
std::string dtype_name(at::ScalarType dtype);
std::optional<at::ScalarType> dtype_named(std::string_view name);
// "F32 [512, 64]".
std::string describe(const TensorSpec& spec);

class SafetensorsFile {
 public:
  struct Entry : TensorSpec {
    int64_t begin = 0;
    int64_t end = 0;
  };

  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const;
  // In the order of their bytes.
  const std::vector<Entry>& tensors() const;
  const Metadata& metadata() const;
  // nullptr where there is none of that name.
  const Entry* find(std::string_view name) const;

  // A view on the mapping, which it keeps alive; never write to it.
  at::Tensor tensor(std::string_view name) const;
  // The part of the tensor that lies in `box`: a view as well.
  at::Tensor read_box(std::string_view name, const mesh::Box& box) const;

  // What was read may leave memory; views stay good.
  void let_go() const;
  // Throws where somebody has written to the file since it was opened: what was
  // read may be of either. One that was replaced stays what it was.
  void require_unchanged() const;

  // The whole file; the header is its first header_bytes().
  std::string_view bytes() const;
  int64_t header_bytes() const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

// Checksums of a file, taken from the bytes in memory while they were written.
inline constexpr int64_t kChecksumBlockBytes = int64_t{1} << 20;

struct TensorSums {
  std::string name;
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<uint32_t>
      blocks;  // CRC32C of each block from begin; last shorter
};

struct FileSums {
  int64_t bytes = 0;
  int64_t header_bytes = 0;
  uint32_t header_crc32c = 0;
  Hash128 hash;                     // of the whole file
  std::vector<TensorSums> tensors;  // in the order of their bytes
};

// Writes `path`, which must not exist, and syncs it. `tensor_of(name)` is asked
// for each tensor just before its bytes are written, so that one at a time need
// be in memory; it must be of the spec's shape and dtype (any device, any
// strides). Order: as in `specs`, wider dtypes first, which keeps every tensor
// aligned. When it fails no file is left.
FileSums write_safetensors(
    const std::string& path, std::vector<TensorSpec> specs,
    const Metadata& metadata,
    const std::function<at::Tensor(const std::string& name)>& tensor_of);

// The order in which write_safetensors asks for tensors: ranks that gather them
// together follow it on every rank.
std::vector<TensorSpec> writing_order(std::vector<TensorSpec> specs);

}  // namespace tessera::checkpoint
