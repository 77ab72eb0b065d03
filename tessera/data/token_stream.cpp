#include "tessera/data/token_stream.h"

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/log.h"
#include "tessera/data/detail/token_layout.h"
#include "tessera/data/detail/utf8.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

// Part of a cache's key: raise it when the same text gets other ids.
constexpr const char* kEncodingVersion = "tessera-encoding-1";
// Files that are mapped at the same time.
constexpr size_t kBatchFiles = 256;

// Text and the cache of its tokens.
struct TextSource {
  std::vector<FileFingerprint> fingerprints;  // of the texts and the tokenizer
  Hash128 key;
  std::string cache_path;
};

Hash128 key_of(const std::vector<FileFingerprint>& fingerprints) {
  std::string text = kEncodingVersion;
  for (const FileFingerprint& file : fingerprints) {
    text += c10::str(' ', file.bytes, ' ', file.xxh3);
  }
  return hash128(text);
}

TextSource text_source(const TokenSource& source) {
  TS_CHECK_CONFIG(source.tokenizer != nullptr, source.paths[0],
                  ": text needs a tokenizer: set data.tokenizer.");
  TS_CHECK_CONFIG(
      source.tokenizer->vocab_size() <= source.vocab_size, "the tokenizer has ",
      source.tokenizer->vocab_size(), " ids, the model's vocabulary ",
      source.vocab_size, ". Set model.vocab to at least ",
      source.tokenizer->vocab_size(), ", or take the model's tokenizer.");
  TextSource text;
  for (const std::string& path : source.paths) {
    text.fingerprints.push_back(fingerprint_of(MappedFile(path)));
    TS_CHECK_CONFIG(text.fingerprints.back().bytes > 0, path, ": is empty.");
  }
  text.fingerprints.push_back(
      fingerprint_of("the tokenizer", source.tokenizer->to_json()));
  text.key = key_of(text.fingerprints);
  text.cache_path = (fs::path(source.cache_folder) /
                     ("tokens-" + to_hex(text.key) + ".cache"))
                        .string();
  return text;
}

std::vector<uint32_t> encode_files(const TokenSource& source) {
  const auto end_of_text = source.tokenizer->end_of_text();
  std::vector<uint32_t> ids;
  for (size_t first = 0; first < source.paths.size(); first += kBatchFiles) {
    std::vector<MappedFile> files;
    std::vector<std::string_view> texts;
    const size_t end = std::min(first + kBatchFiles, source.paths.size());
    for (size_t i = first; i < end; ++i) {
      files.emplace_back(source.paths[i]);
      texts.push_back(detail::text_of(files.back()));
      detail::check_utf8(texts.back(), source.paths[i]);
    }
    for (const auto& part :
         source.tokenizer->encode_texts(texts, source.threads)) {
      if (!ids.empty() && end_of_text) {
        ids.push_back(static_cast<uint32_t>(*end_of_text));
      }
      ids.insert(ids.end(), part.begin(), part.end());
    }
  }
  return ids;
}

// Whether the source is text; the formats of its files must be of one kind.
bool is_text(const TokenSource& source) {
  TS_CHECK_CONFIG(!source.paths.empty(),
                  "there are no files to read tokens "
                  "from.");
  if (source.format != "auto") return source.format == "text";
  const bool first = detect_format(source.paths[0]) == "text";
  for (const std::string& path : source.paths) {
    TS_CHECK_CONFIG((detect_format(path) == "text") == first, source.paths[0],
                    first ? " is text" : " has tokens", " and ", path,
                    first ? " has tokens" : " is text",
                    ": give files of one kind, or set data.format.");
  }
  return first;
}

// Megatron's pairs by their .bin alone, where a glob found both.
std::vector<std::string> without_indexes(const TokenSource& source) {
  std::vector<std::string> paths;
  for (const std::string& path : source.paths) {
    const fs::path bin = fs::path(path).replace_extension(".bin");
    const bool is_index = fs::path(path).extension() == ".idx" &&
                          std::find(source.paths.begin(), source.paths.end(),
                                    bin.string()) != source.paths.end();
    if (!is_index) paths.push_back(path);
  }
  return paths;
}

}  // namespace

TokenStream::TokenStream(std::vector<TokenFile> files,
                         std::vector<FileFingerprint> fingerprints)
    : files_(std::move(files)),
      starts_{0},
      fingerprints_(std::move(fingerprints)) {
  for (const TokenFile& file : files_) {
    starts_.push_back(starts_.back() + file.size());
  }
}

void TokenStream::read(int64_t first, std::span<int64_t> out) const {
  TORCH_INTERNAL_ASSERT(
      first >= 0 && static_cast<int64_t>(out.size()) <= size() - first,
      "tokens ", first, " + ", out.size(), " of ", size());
  size_t i = std::upper_bound(starts_.begin(), starts_.end(), first) -
             starts_.begin() - 1;
  for (; !out.empty(); ++i) {
    const int64_t here =
        std::min(static_cast<int64_t>(out.size()), starts_[i + 1] - first);
    files_[i].read(first - starts_[i], out.first(here));
    out = out.subspan(here);
    first += here;
  }
}

void prepare_tokens(const TokenSource& source) {
  if (!is_text(source)) return;
  const TextSource text = text_source(source);
  if (fs::exists(text.cache_path)) {
    if (detail::is_cache_of(MappedFile(text.cache_path), text.key)) return;
    log::warning(text.cache_path, " is damaged: the text is tokenized again.");
  }
  const auto start = std::chrono::steady_clock::now();
  const std::vector<uint32_t> ids = encode_files(source);
  const IdType type =
      source.tokenizer->vocab_size() <= (1 << 16) ? IdType::kU16 : IdType::kU32;
  write_file_atomic(text.cache_path,
                    detail::cache_content(text.key, ids, type));
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - start;
  log::info("tokenized ", source.paths.size(), " files into ", ids.size(),
            " tokens in ", seconds.count(), " s: ", text.cache_path);
}

TokenStream open_tokens(const TokenSource& source) {
  std::vector<TokenFile> files;
  std::vector<FileFingerprint> fingerprints;
  if (is_text(source)) {
    TextSource text = text_source(source);
    TS_CHECK_IO(detail::is_cache_of(MappedFile(text.cache_path), text.key),
                text.cache_path,
                ": is no cache of the text. Was the text changed, or "
                "the cache not prepared?");
    files.emplace_back(text.cache_path, "cache", source.vocab_size);
    return TokenStream(std::move(files), std::move(text.fingerprints));
  }
  for (const std::string& path : without_indexes(source)) {
    files.emplace_back(path, source.format, source.vocab_size);
    const auto& more = files.back().fingerprints();
    fingerprints.insert(fingerprints.end(), more.begin(), more.end());
  }
  return TokenStream(std::move(files), std::move(fingerprints));
}

}  // namespace tessera::data
