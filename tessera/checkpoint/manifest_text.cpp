#include <algorithm>
#include <charconv>
#include <limits>
#include <set>

#include "tessera/checkpoint/manifest.h"
#include "tessera/core/crc32c.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

using tessera::detail::as_int;
using tessera::detail::as_string;
using tessera::detail::in_quotes;
using tessera::detail::Json;

std::string crc_hex(uint32_t crc) { return to_hex(uint64_t{crc}).substr(8); }

// ---- to text

std::string blocks_to_hex(const std::vector<uint32_t>& blocks) {
  std::string text;
  for (const uint32_t crc : blocks) text += crc_hex(crc);
  return text;
}

Json to_json(const SavedBox& saved, const TensorSpec& tensor) {
  Json json;
  json["tensor"] = tensor.name;
  json["offset"] = saved.box.offset;
  json["size"] = saved.box.size;
  json["begin"] = saved.sums.begin;
  json["end"] = saved.sums.end;
  json["blocks_crc32c"] = blocks_to_hex(saved.sums.blocks);
  return json;
}

// The last line: a checksum of all bytes before it.
std::string seal_of(std::string_view text) {
  return " \"crc32c\": \"" + crc_hex(crc32c(std::as_bytes(std::span(text)))) +
         "\"\n}\n";
}

// One item a line, so that people and diff can read it.
template <typename Items, typename Format>
std::string list_of(const Items& items, const std::string& indent,
                    const Format& format) {
  std::string text = "[";
  for (const auto& item : items) {
    text += (text.size() > 1 ? ",\n" : "\n") + indent + format(item);
  }
  return text + "]";
}

// ---- from text

// A list of non-negative integers.
std::vector<int64_t> sizes_of(const Json& json, const std::string& where) {
  TS_CHECK_IO(json.is_array(), where, ": is not a list");
  std::vector<int64_t> sizes;
  for (const Json& item : json) {
    sizes.push_back(as_int(item, where));
    TS_CHECK_IO(sizes.back() >= 0, where, ": ", sizes.back(), " is negative");
  }
  return sizes;
}

const Json& member(const Json& object, const char* name,
                   const std::string& where) {
  TS_CHECK_IO(object.is_object(), where, ": is not an object");
  const auto found = object.find(name);
  TS_CHECK_IO(found != object.end(), where, ": lacks \"", name, "\"");
  return *found;
}

int64_t count_in(const Json& object, const char* name,
                 const std::string& where) {
  const std::string place = where + ", \"" + name + "\"";
  const int64_t value = as_int(member(object, name, where), place);
  TS_CHECK_IO(value >= 0, place, ": ", value, " is negative");
  return value;
}

std::string text_in(const Json& object, const char* name,
                    const std::string& where) {
  return as_string(member(object, name, where), where + ", \"" + name + "\"");
}

const Json& list_in(const Json& object, const char* name,
                    const std::string& where) {
  const Json& list = member(object, name, where);
  TS_CHECK_IO(list.is_array(), where, ", \"", name, "\": is not a list");
  return list;
}

template <typename Number>
Number number_from_hex(std::string_view digits, const std::string& where) {
  Number value = 0;
  const char* begin = digits.data();
  const char* end = begin + digits.size();
  const auto result = std::from_chars(begin, end, value, 16);
  TS_CHECK_IO(digits.size() == sizeof(Number) * 2 && result.ptr == end &&
                  result.ec == std::errc(),
              where, ": ", in_quotes(digits), " is not ", sizeof(Number) * 2,
              " hex digits");
  return value;
}

std::vector<uint32_t> blocks_from_hex(const std::string& digits,
                                      const std::string& where) {
  std::vector<uint32_t> blocks;
  for (size_t at = 0; at < digits.size(); at += 8) {
    blocks.push_back(number_from_hex<uint32_t>(
        std::string_view(digits).substr(at, 8), where));
  }
  return blocks;
}

Hash128 hash_from_hex(const std::string& digits, const std::string& where) {
  TS_CHECK_IO(digits.size() == 32, where, ": ", in_quotes(digits),
              " is not 32 hex digits");
  const std::string_view view = digits;
  return {.low = number_from_hex<uint64_t>(view.substr(16), where),
          .high = number_from_hex<uint64_t>(view.substr(0, 16), where)};
}

TensorSpec tensor_from(const Json& json, const std::string& source) {
  TensorSpec tensor;
  tensor.name = text_in(json, "name", source);
  const std::string where = source + ": tensor " + in_quotes(tensor.name);
  const std::string dtype = text_in(json, "dtype", where);
  const auto known = dtype_named(dtype);
  TS_CHECK_IO(known.has_value(), where, ": dtype ", in_quotes(dtype),
              " is not ", kDtypeNames);
  tensor.dtype = *known;
  tensor.shape = sizes_of(member(json, "shape", where), where + ", \"shape\"");
  int64_t bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  for (const int64_t size : tensor.shape) {
    TS_CHECK_IO(
        !__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes),
        where, ": the product of its shape overflows");
  }
  return tensor;
}

void check_box(const SavedBox& saved, const TensorSpec& tensor,
               const std::string& where) {
  const auto& [offset, size] = saved.box;
  bool inside = offset.size() == tensor.shape.size() &&
                size.size() == tensor.shape.size();
  for (size_t dim = 0; inside && dim < size.size(); ++dim) {
    inside = size[dim] <= tensor.shape[dim] &&
             offset[dim] <= tensor.shape[dim] - size[dim];
  }
  TS_CHECK_IO(inside, where, ": offset ", at::IntArrayRef(offset), " and size ",
              at::IntArrayRef(size), " do not lie in ", describe(tensor));
  const TensorSpec part{tensor.name, tensor.dtype, size};
  TS_CHECK_IO(saved.sums.begin <= saved.sums.end &&
                  saved.sums.end - saved.sums.begin == part.bytes(),
              where, ": bytes ", saved.sums.begin, " to ", saved.sums.end,
              " are not the ", part.bytes(), " of ", describe(part));
  const int64_t blocks = part.bytes() / kChecksumBlockBytes +
                         (part.bytes() % kChecksumBlockBytes != 0 ? 1 : 0);
  TS_CHECK_IO(std::ssize(saved.sums.blocks) == blocks, where, ": has ",
              saved.sums.blocks.size(), " block checksums, not ", blocks);
}

SavedBox box_from(const Json& json, const std::vector<TensorSpec>& tensors,
                  const std::string& source) {
  SavedBox saved;
  saved.sums.name = text_in(json, "tensor", source);
  const std::string where = source + ", tensor " + in_quotes(saved.sums.name);
  const auto tensor =
      std::ranges::lower_bound(tensors, saved.sums.name, {}, &TensorSpec::name);
  TS_CHECK_IO(tensor != tensors.end() && tensor->name == saved.sums.name, where,
              ": is not in the manifest's list of tensors");
  saved.tensor = static_cast<size_t>(tensor - tensors.begin());
  saved.box.offset = sizes_of(member(json, "offset", where), where);
  saved.box.size = sizes_of(member(json, "size", where), where);
  saved.sums.begin = count_in(json, "begin", where);
  saved.sums.end = count_in(json, "end", where);
  saved.sums.blocks =
      blocks_from_hex(text_in(json, "blocks_crc32c", where), where);
  check_box(saved, *tensor, where);
  return saved;
}

bool is_shard_name(const std::string& name) {
  constexpr std::string_view kFirst = "shard-";
  constexpr std::string_view kLast = "-model-00001-of-00001.safetensors";
  if (!name.starts_with(kFirst) || !name.ends_with(kLast)) return false;
  const auto number = std::string_view(name).substr(
      kFirst.size(), name.size() - kFirst.size() - kLast.size());
  return number.size() >= 5 && number.size() <= 9 &&
         number.find_first_not_of("0123456789") == std::string_view::npos;
}

SavedFile file_from(const Json& json, const std::vector<TensorSpec>& tensors,
                    const std::string& source) {
  SavedFile file;
  file.name = text_in(json, "name", source);
  const std::string where = source + ": file " + in_quotes(file.name);
  TS_CHECK_IO(is_shard_name(file.name), where,
              ": is not a name of this format, shard-NNNNN-model-00001-of-"
              "00001.safetensors");
  file.bytes = count_in(json, "bytes", where);
  file.header_bytes = count_in(json, "header_bytes", where);
  file.header_crc32c =
      number_from_hex<uint32_t>(text_in(json, "header_crc32c", where), where);
  file.hash = hash_from_hex(text_in(json, "xxh3_128", where), where);
  int64_t end = file.header_bytes;
  for (const Json& box : list_in(json, "boxes", where)) {
    file.boxes.push_back(box_from(box, tensors, where));
    const SavedBox& saved = file.boxes.back();
    TS_CHECK_IO(saved.sums.begin == end, where, ", tensor ",
                in_quotes(saved.sums.name), ": begins at byte ",
                saved.sums.begin, ", not at ", end);
    end = saved.sums.end;
  }
  TS_CHECK_IO(end == file.bytes, where, ": its tensors end at byte ", end,
              " of ", file.bytes);
  return file;
}

// The text without its seal, closed again.
std::string unseal(const std::string& text, const std::string& source) {
  const size_t length = seal_of("").size();
  TS_CHECK_IO(text.size() > length, source, ": has only ", text.size(),
              " bytes: truncated");
  std::string body = text.substr(0, text.size() - length);
  TS_CHECK_IO(text.ends_with(seal_of(body)), source,
              ": its checksum differs: it was changed or cut off after it was "
              "written");
  TS_CHECK_IO(body.ends_with(",\n"), source, ": has nothing to seal");
  body.replace(body.size() - 2, 2, "}");
  return body;
}

template <typename Items, typename Project>
void check_differ(const Items& items, const Project& name,
                  const std::string& where) {
  std::set<std::string_view> seen;
  for (const auto& item : items) {
    TS_CHECK_IO(seen.insert(item.*name).second, where, ": ",
                in_quotes(item.*name), " is there twice");
  }
}

}  // namespace

std::string format_manifest(const Manifest& manifest) {
  const auto line = [](const char* name, const Json& value) {
    return std::string(" \"") + name + "\": " + value.dump() + ",\n";
  };
  std::string text = "{\n";
  text += line("format", "tessera.checkpoint");
  text += line("version", kManifestVersion);
  text += line("step", manifest.step);
  text += line("sequence", manifest.sequence);
  text += line("parent", manifest.parent ? Json(*manifest.parent) : Json());
  text += line("world_size", manifest.world_size);
  text += line("mesh", manifest.mesh);
  text += line("extra", manifest.extra);
  text += line("block_bytes", kChecksumBlockBytes);
  text += " \"tensors\": " +
          list_of(manifest.tensors, "  ",
                  [](const TensorSpec& tensor) {
                    return Json{{"name", tensor.name},
                                {"dtype", dtype_name(tensor.dtype)},
                                {"shape", tensor.shape}}
                        .dump();
                  }) +
          ",\n";
  const auto format_box = [&](const SavedBox& saved) {
    return to_json(saved, manifest.tensors[saved.tensor]).dump();
  };
  const auto format_file = [&](const SavedFile& file) {
    std::string head = Json{{"name", file.name},
                            {"bytes", file.bytes},
                            {"header_bytes", file.header_bytes},
                            {"header_crc32c", crc_hex(file.header_crc32c)},
                            {"xxh3_128", to_hex(file.hash)}}
                           .dump();
    head.pop_back();
    return head + ",\"boxes\":" + list_of(file.boxes, "   ", format_box) + "}";
  };
  text += " \"files\": " + list_of(manifest.files, "  ", format_file) + ",\n";
  return text + seal_of(text);
}

Manifest parse_manifest(const std::string& text, const std::string& source) {
  const Json json = tessera::detail::parse_json(
      unseal(text, source), source, {.max_bytes = kMaxManifestBytes});
  TS_CHECK_IO(text_in(json, "format", source) == "tessera.checkpoint", source,
              ": is not the manifest of a Tessera checkpoint");
  const int64_t version = count_in(json, "version", source);
  TS_CHECK_IO(version == kManifestVersion, source, ": has version ", version,
              "; this program reads version ", kManifestVersion);
  TS_CHECK_IO(count_in(json, "block_bytes", source) == kChecksumBlockBytes,
              source, ": block_bytes is not ", kChecksumBlockBytes);
  Manifest manifest;
  manifest.step = count_in(json, "step", source);
  manifest.sequence = count_in(json, "sequence", source);
  TS_CHECK_IO(manifest.sequence < std::numeric_limits<int64_t>::max(), source,
              ": sequence ", manifest.sequence, " has no successor");
  if (!member(json, "parent", source).is_null()) {
    manifest.parent = count_in(json, "parent", source);
  }
  manifest.world_size = count_in(json, "world_size", source);
  TS_CHECK_IO(manifest.world_size > 0, source, ": world_size is 0");
  manifest.mesh = text_in(json, "mesh", source);
  manifest.extra = text_in(json, "extra", source);
  for (const Json& tensor : list_in(json, "tensors", source)) {
    manifest.tensors.push_back(tensor_from(tensor, source));
  }
  check_differ(manifest.tensors, &TensorSpec::name, source);
  std::ranges::sort(manifest.tensors, {}, &TensorSpec::name);
  for (const Json& file : list_in(json, "files", source)) {
    manifest.files.push_back(file_from(file, manifest.tensors, source));
  }
  check_differ(manifest.files, &SavedFile::name, source);
  return manifest;
}

}  // namespace tessera::checkpoint
