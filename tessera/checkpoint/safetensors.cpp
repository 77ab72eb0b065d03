#include "tessera/checkpoint/safetensors.h"

#include <ATen/Functions.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "tessera/checkpoint/detail/file_hash.h"
#include "tessera/checkpoint/detail/posix_file.h"
#include "tessera/checkpoint/detail/safetensors_header.h"
#include "tessera/core/crc32c.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::checkpoint {
namespace {

using tessera::detail::in_quotes;

static_assert(std::endian::native == std::endian::little,
              "safetensors files are little-endian");

constexpr int64_t kLengthBytes = 8;

struct DtypeName {
  std::string_view name;
  at::ScalarType dtype;
};
constexpr std::array kDtypes = {
    DtypeName{"F64", at::kDouble}, DtypeName{"F32", at::kFloat},
    DtypeName{"F16", at::kHalf},   DtypeName{"BF16", at::kBFloat16},
    DtypeName{"I64", at::kLong},   DtypeName{"I32", at::kInt},
    DtypeName{"I16", at::kShort},  DtypeName{"I8", at::kChar},
    DtypeName{"U8", at::kByte},    DtypeName{"BOOL", at::kBool}};

}  // namespace

int64_t TensorSpec::bytes() const {
  int64_t count = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : shape) count *= size;
  return count;
}

std::string dtype_name(at::ScalarType dtype) {
  const auto* found = std::ranges::find(kDtypes, dtype, &DtypeName::dtype);
  TS_CHECK_IO(found != kDtypes.end(), "safetensors: no name for the dtype ",
              c10::toString(dtype));
  return std::string(found->name);
}

std::optional<at::ScalarType> dtype_named(std::string_view name) {
  const auto* found = std::ranges::find(kDtypes, name, &DtypeName::name);
  if (found == kDtypes.end()) return std::nullopt;
  return found->dtype;
}

std::string describe(const TensorSpec& spec) {
  return c10::str(dtype_name(spec.dtype), " ", at::IntArrayRef(spec.shape));
}

// ---- reader

namespace {

// When a file was last written to; none: it is gone.
struct Written {
  ino_t inode = 0;
  time_t seconds = 0;
  int64_t nanoseconds = 0;

  bool operator==(const Written&) const = default;

  static std::optional<Written> of(const std::string& path) {
    struct stat found{};
    if (::stat(path.c_str(), &found) != 0) return std::nullopt;
    return Written{found.st_ino, found.st_mtim.tv_sec, found.st_mtim.tv_nsec};
  }
};

}  // namespace

struct SafetensorsFile::Impl {
  explicit Impl(const std::string& path)
      : written(Written::of(path)), file(path) {
    parse();
  }

  void parse();
  const Entry* find(std::string_view name) const;
  const Entry& at(std::string_view name) const;
  const std::string& path() const { return file.path(); }

  const std::optional<Written> written;  // before it was opened
  MappedFile file;
  int64_t header_bytes = 0;
  Metadata metadata;
  std::vector<Entry> tensors;  // by begin
  std::vector<const Entry*> tensors_by_name;
};

void SafetensorsFile::Impl::parse() {
  const auto size = static_cast<int64_t>(file.size());
  TS_CHECK_IO(size >= kLengthBytes, path(), ": has ", size,
              " bytes; a safetensors file begins with 8 bytes of length");
  const auto* data = reinterpret_cast<const char*>(file.bytes().data());
  uint64_t length = 0;
  std::memcpy(&length, data, kLengthBytes);
  TS_CHECK_IO(length <= kMaxHeaderBytes, path(), ": header says it has ",
              length, " bytes; at most ", kMaxHeaderBytes, " are allowed");
  header_bytes = kLengthBytes + static_cast<int64_t>(length);
  TS_CHECK_IO(header_bytes <= size, path(), ": header says it has ", length,
              " bytes, but the file has ", size, ": truncated");
  auto header = detail::parse_header({data + kLengthBytes, length}, path());
  metadata = std::move(header.metadata);
  tensors = std::move(header.tensors);

  const int64_t room = size - header_bytes;
  for (Entry& tensor : tensors) {
    TS_CHECK_IO(tensor.end <= room, path(), ": tensor ", in_quotes(tensor.name),
                " ends at byte ", tensor.end, " of the data, but the file has ",
                room, " of them: truncated");
    tensor.begin += header_bytes;
    tensor.end += header_bytes;
    tensors_by_name.push_back(&tensor);
  }
  const int64_t end = tensors.empty() ? header_bytes : tensors.back().end;
  TS_CHECK_IO(end == size, path(), ": the tensors end at byte ", end,
              ", but the file has ", size, " bytes");
  std::ranges::sort(tensors_by_name, {}, &Entry::name);
}

const SafetensorsFile::Entry* SafetensorsFile::Impl::find(
    std::string_view name) const {
  const auto found =
      std::ranges::lower_bound(tensors_by_name, name, {}, &Entry::name);
  return found != tensors_by_name.end() && (*found)->name == name ? *found
                                                                  : nullptr;
}

const SafetensorsFile::Entry& SafetensorsFile::Impl::at(
    std::string_view name) const {
  const Entry* entry = find(name);
  TS_CHECK_IO(entry != nullptr, path(), ": has no tensor ", in_quotes(name));
  return *entry;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : impl_(std::make_shared<const Impl>(path)) {}

const std::string& SafetensorsFile::path() const { return impl_->path(); }

const std::vector<SafetensorsFile::Entry>& SafetensorsFile::tensors() const {
  return impl_->tensors;
}

const Metadata& SafetensorsFile::metadata() const { return impl_->metadata; }

const SafetensorsFile::Entry* SafetensorsFile::find(
    std::string_view name) const {
  return impl_->find(name);
}

at::Tensor SafetensorsFile::tensor(std::string_view name) const {
  const Entry& entry = impl_->at(name);
  // A tensor has no read-only memory; the header's contract is not to write.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  char* begin = const_cast<char*>(bytes().data()) + entry.begin;
  const auto options = at::TensorOptions().dtype(entry.dtype);
  if (entry.begin == entry.end) return at::empty(entry.shape, options);
  if (reinterpret_cast<uintptr_t>(begin) % c10::elementSize(entry.dtype) != 0) {
    // Other writers need not align: such a tensor is copied to where it may be.
    at::Tensor copy = at::empty(entry.shape, options);
    std::memcpy(copy.data_ptr(), begin, entry.end - entry.begin);
    return copy;
  }
  return at::from_blob(begin, entry.shape, [keep = impl_](void*) {}, options);
}

at::Tensor SafetensorsFile::read_box(std::string_view name,
                                     const mesh::Box& box) const {
  const Entry& entry = impl_->at(name);
  bool inside = box.offset.size() == entry.shape.size() &&
                box.size.size() == entry.shape.size();
  for (size_t dim = 0; inside && dim < entry.shape.size(); ++dim) {
    inside = box.offset[dim] >= 0 && box.size[dim] >= 0 &&
             box.offset[dim] <= entry.shape[dim] - box.size[dim];
  }
  TS_CHECK_IO(inside, path(), ": tensor ", in_quotes(name), " of ",
              describe(entry), " has no part at offset ",
              at::IntArrayRef(box.offset), " of size ",
              at::IntArrayRef(box.size));
  at::Tensor view = tensor(name);
  for (size_t dim = 0; dim < entry.shape.size(); ++dim) {
    view =
        view.narrow(static_cast<int64_t>(dim), box.offset[dim], box.size[dim]);
  }
  return view;
}

void SafetensorsFile::let_go() const { impl_->file.let_go(); }

void SafetensorsFile::require_unchanged() const {
  impl_->file.require_whole();
  const auto now = Written::of(path());
  TS_CHECK_IO(!now || !impl_->written || now->inode != impl_->written->inode ||
                  *now == *impl_->written,
              path(),
              ": was written to while it was read. Do not change weights "
              "while they are in use.");
}

std::string_view SafetensorsFile::bytes() const {
  const auto bytes = impl_->file.bytes();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

int64_t SafetensorsFile::header_bytes() const { return impl_->header_bytes; }

// ---- writer

namespace {

// The file and its checksums: each block is hashed in memory, then written.
class SummedFile {
 public:
  explicit SummedFile(const std::string& path) : file_(path) {}

  void write_header(const std::string& text) {
    std::string bytes(kLengthBytes, '\0');
    const uint64_t length = text.size();
    std::memcpy(bytes.data(), &length, kLengthBytes);
    bytes += text;
    sums_.header_crc32c = crc32c(std::as_bytes(std::span(bytes)));
    sums_.header_bytes = static_cast<int64_t>(bytes.size());
    append(bytes.data(), bytes.size());
  }

  void write_tensor(const std::string& name, const at::Tensor& tensor) {
    const auto bytes =
        std::span(static_cast<const std::byte*>(tensor.const_data_ptr()),
                  tensor.nbytes());
    const auto size = static_cast<int64_t>(bytes.size());
    TensorSums sums{name, file_.bytes(), file_.bytes() + size, {}};
    for (int64_t at = 0; at < size; at += kChecksumBlockBytes) {
      const auto block =
          bytes.subspan(at, std::min(kChecksumBlockBytes, size - at));
      sums.blocks.push_back(crc32c(block));
      append(block.data(), block.size());
    }
    sums_.tensors.push_back(std::move(sums));
  }

  FileSums close() {
    file_.close();
    sums_.bytes = file_.bytes();
    sums_.hash = hash_.digest();
    return std::move(sums_);
  }

 private:
  void append(const void* data, size_t size) {
    hash_.update(data, size);
    file_.write(data, size);
  }

  detail::NewFile file_;
  detail::FileHash hash_;
  FileSums sums_;
};

detail::SafetensorsHeader plan_header(const std::string& path,
                                      const std::vector<TensorSpec>& specs,
                                      const Metadata& metadata) {
  detail::SafetensorsHeader header{{}, metadata};
  std::vector<std::string_view> names;
  int64_t end = 0;
  for (const TensorSpec& spec : specs) {
    header.tensors.push_back({spec, end, end + spec.bytes()});
    end += spec.bytes();
    names.push_back(spec.name);
  }
  std::ranges::sort(names);
  const auto twice = std::ranges::adjacent_find(names);
  TS_CHECK_IO(twice == names.end(), path, ": two tensors would be called ",
              in_quotes(*twice));
  const auto reserved = std::ranges::binary_search(names, "__metadata__");
  TS_CHECK_IO(!reserved, path, ": no tensor may be called __metadata__");
  return header;
}

}  // namespace

std::vector<TensorSpec> writing_order(std::vector<TensorSpec> specs) {
  std::ranges::stable_sort(specs, std::greater{}, [](const TensorSpec& spec) {
    return c10::elementSize(spec.dtype);
  });
  return specs;
}

FileSums write_safetensors(
    const std::string& path, std::vector<TensorSpec> specs,
    const Metadata& metadata,
    const std::function<at::Tensor(const std::string& name)>& tensor_of) {
  specs = writing_order(std::move(specs));
  const std::string header =
      detail::format_header(plan_header(path, specs, metadata));
  TS_CHECK_IO(std::ssize(header) <= kMaxHeaderBytes &&
                  std::ssize(specs) <= kMaxTensorsPerFile,
              path, ": ", specs.size(), " tensors need a header of ",
              header.size(), " bytes; readers allow ", kMaxTensorsPerFile,
              " tensors and ", kMaxHeaderBytes,
              " bytes. Write more files, each of fewer tensors.");
  SummedFile file(path);
  file.write_header(header);
  for (const TensorSpec& spec : specs) {
    const at::Tensor given = tensor_of(spec.name);
    TORCH_INTERNAL_ASSERT(
        given.scalar_type() == spec.dtype && given.sizes() == spec.shape,
        "tensor ", spec.name, " is not the ", describe(spec), " announced");
    file.write_tensor(spec.name, given.detach().cpu().contiguous());
  }
  return file.close();
}

}  // namespace tessera::checkpoint
