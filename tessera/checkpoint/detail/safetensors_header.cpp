#include "tessera/checkpoint/detail/safetensors_header.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <numeric>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint::detail {
namespace {

using tessera::detail::in_quotes;
using tessera::detail::Json;

constexpr std::string_view kMetadataKey = "__metadata__";

// Builds the header while the parser reads: no tree is made of a header that
// may be 100 MB large, and what does not belong there ends it at once.
class HeaderHandler {
 public:
  HeaderHandler(const std::string& source, SafetensorsHeader& header)
      : source_(source), header_(header) {}

  bool null() { return refuse_value("null"); }
  bool boolean(bool) { return refuse_value("a boolean"); }
  bool number_integer(int64_t value) {
    return refuse_value(std::to_string(value));
  }
  bool number_float(double, const std::string& text) {
    return refuse_value(text.substr(0, 40));
  }
  bool binary(std::vector<uint8_t>&) { return refuse_value("binary"); }

  bool number_unsigned(uint64_t value) {
    if (list_ == nullptr) return refuse_value(std::to_string(value));
    if (value > std::numeric_limits<int64_t>::max()) {
      refuse(field_, ": ", value, " is too large");
    }
    const size_t most = field_ == "shape" ? kMaxTensorDims : 2;
    if (list_->size() == most) {
      refuse(field_, " has more than ", most, " numbers");
    }
    list_->push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(std::string& text) {
    if (place_ == Place::kMetadata) {
      header_.metadata[field_] = std::move(text);
      return true;
    }
    if (place_ != Place::kTensor || list_ != nullptr || field_ != "dtype") {
      return refuse_value("a string");
    }
    const auto dtype = dtype_named(text);
    if (!dtype) refuse("dtype ", in_quotes(text), " is not ", kDtypeNames);
    current_.dtype = *dtype;
    return true;
  }

  bool start_object(size_t) {
    if (place_ == Place::kOutside) {
      place_ = Place::kTop;
    } else if (place_ == Place::kTop) {
      place_ = name_ == kMetadataKey ? Place::kMetadata : Place::kTensor;
      current_ = {};
      current_.name = name_;
      shape_seen_ = dtype_seen_ = offsets_seen_ = false;
      offsets_.clear();
    } else {
      return refuse_value("an object");
    }
    return true;
  }

  bool key(std::string& text) {
    if (place_ == Place::kTop) return top_key(std::move(text));
    field_ = std::move(text);
    if (place_ == Place::kMetadata) {
      if (std::ssize(header_.metadata) == kMaxMetadataEntries) {
        refuse("has more than ", kMaxMetadataEntries, " entries");
      }
      if (!header_.metadata.emplace(field_, "").second) {
        refuse("the key ", in_quotes(field_), " is there twice");
      }
      return true;
    }
    bool* seen = field_ == "dtype"          ? &dtype_seen_
                 : field_ == "shape"        ? &shape_seen_
                 : field_ == "data_offsets" ? &offsets_seen_
                                            : nullptr;
    if (seen == nullptr) {
      refuse("unknown field ", in_quotes(field_),
             "; known are dtype, shape, data_offsets");
    }
    if (*seen) refuse("the field ", field_, " is there twice");
    *seen = true;
    return true;
  }

  bool end_object() {
    if (place_ == Place::kTensor) finish_tensor();
    place_ = place_ == Place::kTop ? Place::kOutside : Place::kTop;
    return true;
  }

  bool start_array(size_t) {
    const bool expected = place_ == Place::kTensor && list_ == nullptr &&
                          (field_ == "shape" || field_ == "data_offsets");
    if (!expected) return refuse_value("a list");
    list_ = field_ == "shape" ? &current_.shape : &offsets_;
    return true;
  }

  bool end_array() {
    list_ = nullptr;
    return true;
  }

  bool parse_error(size_t position, const std::string& token,
                   const nlohmann::detail::exception& error) {
    TS_CHECK_IO(false, source_, ": header is no JSON at byte ", position + 7,
                ", near ", in_quotes(token));
    return false;
  }

 private:
  enum class Place { kOutside, kTop, kMetadata, kTensor };

  template <typename... Args>
  [[noreturn]] void refuse(const Args&... what) {
    const bool metadata = name_ == kMetadataKey;
    tessera::detail::throw_error(
        ExitCode::kInputOutput,
        c10::str(source_, ": header, ",
                 metadata ? name_ : "tensor " + in_quotes(name_), ": ",
                 what...),
        {__func__, __FILE__, __LINE__});
  }

  bool refuse_value(const std::string& what) {
    TS_CHECK_IO(place_ != Place::kOutside, source_, ": header is ", what,
                ", not an object");
    refuse(place_ == Place::kTop ? "" : in_quotes(field_) + ": ", what,
           " is not what the format has here");
  }

  bool top_key(std::string text) {
    name_ = std::move(text);
    if (name_ == kMetadataKey) {
      TS_CHECK_IO(!metadata_seen_, source_, ": header has ", kMetadataKey,
                  " twice");
      metadata_seen_ = true;
      return true;
    }
    TS_CHECK_IO(std::ssize(header_.tensors) < kMaxTensorsPerFile, source_,
                ": header has more than ", kMaxTensorsPerFile, " tensors");
    return true;
  }

  void finish_tensor() {
    if (!dtype_seen_ || !shape_seen_ || !offsets_seen_) {
      refuse("needs dtype, shape and data_offsets");
    }
    if (offsets_.size() != 2) {
      refuse("data_offsets has ", offsets_.size(), " numbers, not 2");
    }
    int64_t elements = c10::elementSize(current_.dtype);
    // Strides too must not overflow: a zero does not excuse the other dims.
    int64_t strides = elements;
    for (const int64_t size : current_.shape) {
      const bool fits = !__builtin_mul_overflow(elements, size, &elements) &&
                        !__builtin_mul_overflow(
                            strides, std::max<int64_t>(size, 1), &strides);
      if (!fits) refuse("the product of its shape overflows");
    }
    current_.begin = offsets_[0];
    current_.end = offsets_[1];
    if (current_.begin > current_.end) {
      refuse("data_offsets [", current_.begin, ", ", current_.end,
             "] run backwards");
    }
    if (current_.end - current_.begin != elements) {
      refuse("shape and dtype need ", elements, " bytes, data_offsets [",
             current_.begin, ", ", current_.end, "] have ",
             current_.end - current_.begin);
    }
    header_.tensors.push_back(std::move(current_));
  }

  const std::string& source_;
  SafetensorsHeader& header_;
  Place place_ = Place::kOutside;
  bool metadata_seen_ = false;
  std::string name_;   // key at the top
  std::string field_;  // key below it
  SafetensorsFile::Entry current_;
  bool shape_seen_ = false;
  bool dtype_seen_ = false;
  bool offsets_seen_ = false;
  std::vector<int64_t> offsets_;
  std::vector<int64_t>* list_ = nullptr;  // of the array being read
};

void check_names_differ(const SafetensorsHeader& header,
                        const std::string& source) {
  std::vector<std::string_view> names;
  names.reserve(header.tensors.size());
  for (const auto& tensor : header.tensors) names.push_back(tensor.name);
  std::ranges::sort(names);
  const auto twice = std::ranges::adjacent_find(names);
  TS_CHECK_IO(twice == names.end(), source, ": header has the tensor ",
              in_quotes(*twice), " twice");
}

// Neither overlap nor hole: each tensor begins where the one before it ends.
void check_no_gap(const SafetensorsHeader& header, const std::string& source) {
  int64_t end = 0;
  for (const auto& tensor : header.tensors) {
    TS_CHECK_IO(tensor.begin == end, source, ": header, tensor ",
                in_quotes(tensor.name), ": begins at byte ", tensor.begin,
                " of the data, but the one before it ends at ", end,
                tensor.begin < end ? " (overlap)" : " (hole)");
    end = tensor.end;
  }
}

}  // namespace

SafetensorsHeader parse_header(std::string_view text,
                               const std::string& source) {
  TS_CHECK_IO(text.starts_with('{'), source,
              ": header does not begin with '{'");
  TS_CHECK_IO(text.find('\0') == std::string_view::npos, source,
              ": header has a zero byte at byte ", text.find('\0') + 8);
  const size_t end = text.find_last_not_of(' ') + 1;
  TS_CHECK_IO(text[end - 1] == '}', source,
              ": header does not end with '}' and blanks");
  SafetensorsHeader header;
  HeaderHandler handler(source, header);
  Json::sax_parse(text.begin(), text.begin() + end, &handler);
  check_names_differ(header, source);
  std::ranges::sort(header.tensors, [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  check_no_gap(header, source);
  return header;
}

std::string format_header(const SafetensorsHeader& header) {
  // Written by hand around escaped strings: a tree of many tensors would be
  // searched once for each.
  std::string text = "{";
  if (!header.metadata.empty()) {
    text += "\"__metadata__\":" + Json(header.metadata).dump();
  }
  for (const auto& tensor : header.tensors) {
    if (text.size() > 1) text += ',';
    text +=
        Json(tensor.name).dump() + ":{\"dtype\":\"" + dtype_name(tensor.dtype) +
        "\",\"shape\":" + Json(tensor.shape).dump() + ",\"data_offsets\":[" +
        std::to_string(tensor.begin) + ',' + std::to_string(tensor.end) + "]}";
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

}  // namespace tessera::checkpoint::detail
