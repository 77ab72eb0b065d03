#include "tessera/data/token_file.h"

#include <array>
#include <filesystem>

#include "tessera/core/error.h"
#include "tessera/data/detail/token_layout.h"
#include "tessera/data/documents.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

// The .bin and .idx that a Megatron path means.
struct MegatronPaths {
  explicit MegatronPaths(const std::string& path) {
    const fs::path given(path);
    const bool is_prefix =
        given.extension() != ".bin" && given.extension() != ".idx";
    const std::string stem =
        is_prefix ? path : fs::path(given).replace_extension().string();
    bin = stem + ".bin";
    index = stem + ".idx";
  }
  std::string bin;
  std::string index;
};

// One rule for all formats that people have.
void require_any(const MappedFile& file) {
  TS_CHECK_CONFIG(file.size() > 0, file.path(),
                  ": has no tokens: it is empty.");
}

bool has_megatron_index(const std::string& path) {
  const MegatronPaths paths(path);
  return fs::is_regular_file(paths.bin) && fs::is_regular_file(paths.index) &&
         detail::has_megatron_header(MappedFile(paths.index));
}

detail::TokenLayout layout_of(const MappedFile& file,
                              const std::string& format) {
  if (format == "llmc") return detail::llmc_layout(file);
  if (format == "cache") return detail::cache_layout(file);
  TS_CHECK_IO(!detail::has_llmc_header(file), file.path(),
              ": has llm.c's header, and would be read as ", format,
              ", header included. Set data.format to llmc or auto.");
  return detail::raw_layout(
      file, format == "tokens_u16" ? IdType::kU16 : IdType::kU32);
}

// Ids of 32 bits that are read as 16: every second one is 0, and not all are.
bool looks_like_u32(const TokenIds& ids) {
  constexpr int64_t kLooked = 4096;
  if (ids.count < 2 || ids.count % 2 != 0) return false;
  bool any = false;
  for (int64_t i = 0; i < std::min(kLooked, ids.count); i += 2) {
    if (ids.at(i + 1) != 0) return false;
    any = any || ids.at(i) != 0;
  }
  return any;
}

}  // namespace

std::string detect_format(const std::string& path) {
  const std::string extension = fs::path(path).extension().string();
  if (extension == ".idx" || has_megatron_index(path)) return "megatron";
  if (!fs::is_regular_file(path)) return "text";
  const MappedFile file(path);
  if (detail::has_cache_header(file)) return "cache";
  if (detail::has_llmc_header(file)) return "llmc";
  if (extension == ".bin" || extension == ".u16") return "tokens_u16";
  if (extension == ".u32") return "tokens_u32";
  if (has_json_name(path)) return "jsonl";
  return "text";
}

TokenFile::TokenFile(const std::string& path, const std::string& format,
                     int64_t vocab_size)
    : format_(format == "auto" ? detect_format(path) : format),
      vocab_size_(vocab_size) {
  constexpr std::array kFormats = {"tokens_u16", "tokens_u32", "llmc",
                                   "megatron", "cache"};
  TS_CHECK_CONFIG(
      std::find(kFormats.begin(), kFormats.end(), format_) != kFormats.end(),
      path, ": ", format_,
      " is no format of token files; tokens_u16, "
      "tokens_u32, llmc and megatron are.");
  TS_CHECK_CONFIG(vocab_size > 0, path, ": a vocabulary of ", vocab_size,
                  " has no ids.");
  detail::TokenLayout layout;
  if (format_ == "megatron") {
    const MegatronPaths paths(path);
    file_ = MappedFile(paths.bin);
    const MappedFile index(paths.index);
    require_any(file_);
    require_any(index);
    layout = detail::megatron_layout(file_, index);
    fingerprints_ = {fingerprint_of(file_), fingerprint_of(index)};
  } else {
    file_ = MappedFile(path);
    if (format_ != "cache") require_any(file_);
    layout = layout_of(file_, format_);
    fingerprints_ = {fingerprint_of(file_)};
  }
  ids_ = layout.ids;
  num_documents_ = layout.num_documents;
  TS_CHECK_CONFIG(ids_.count > 0, file_.path(), ": has no tokens.");
  const bool is_guessed = format == "auto" && format_ == "tokens_u16" &&
                          fs::path(path).extension() == ".bin";
  TS_CHECK_CONFIG(
      !is_guessed || vocab_size <= 1 << 16, file_.path(),
      ": ids of a vocabulary of ", vocab_size,
      " do not fit into the 16 bits that a .bin is taken for. Set "
      "data.format to tokens_u32, or to tokens_u16 if it has such.");
  TS_CHECK_IO(
      format != "auto" || format_ != "tokens_u16" || !looks_like_u32(ids_),
      file_.path(),
      ": every second 16-bit id is 0, so the ids seem to "
      "be of 32 bits. Set data.format to tokens_u32, or to tokens_u16 "
      "if they are not.");
}

void TokenFile::check_ids() const { check_range(0, ids_.count); }

void TokenFile::check_range(int64_t first, int64_t size) const {
  const int64_t place = ids_.find_outside(first, size, vocab_size_);
  if (place < 0) return;
  TS_CHECK_IO(false, file_.path(), ": token ", place, " (byte ",
              ids_.data - file_.bytes().data() + place * width_of(ids_.type),
              ") is ", ids_.at(place), ", which is outside the vocabulary of ",
              vocab_size_, " ids, 0 to ", vocab_size_ - 1, ".");
}

void TokenFile::read(int64_t first, std::span<int64_t> out) const {
  const auto size = static_cast<int64_t>(out.size());
  TORCH_INTERNAL_ASSERT(first >= 0 && size <= ids_.count - first, file_.path(),
                        ": tokens ", first, " + ", size, " of ", ids_.count);
  file_.require_whole();
  check_range(first, size);
  ids_.read(first, out);
}

void TokenFile::will_need(int64_t first, int64_t count) const {
  const auto width = width_of(ids_.type);
  file_.will_need(
      {ids_.data + first * width, static_cast<size_t>(count * width)});
}

}  // namespace tessera::data
