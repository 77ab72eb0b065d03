#include "tessera/data/token_stream.h"

#include <algorithm>
#include <filesystem>

#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/ignore_index.h"
#include "tessera/core/log.h"
#include "tessera/data/conversation.h"
#include "tessera/data/detail/chat_samples.h"
#include "tessera/data/detail/token_cache.h"
#include "tessera/data/detail/token_layout.h"
#include "tessera/data/detail/tokenize_documents.h"
#include "tessera/data/documents.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

// Part of a cache's key: raise it when the same text gets other ids.
constexpr const char* kEncodingVersion = "tessera-encoding-1";

// Text and the cache of its tokens.
struct TextSource {
  std::vector<FileFingerprint> fingerprints;  // of the texts and the tokenizer
  Hash128 key;
  std::string cache_path;
};

bool is_document(const std::string& format) {
  return format == "text" || format == "jsonl" || format == "chat";
}

std::string format_of(const TokenSource& source, const std::string& path) {
  if (source.format != "auto") return source.format;
  const std::string format = detect_format(path);
  const bool chats = format == "jsonl" && source.field == "text" &&
                     has_conversations(path, source.chat.pair);
  return chats ? "chat" : format;
}

// Beside the ids: a detail::ChatMark of each.
std::string marks_path(const std::string& cache_path) {
  return cache_path.substr(0, cache_path.rfind('.')) + "-marks.cache";
}

Hash128 key_of(const TokenSource& source,
               const std::vector<FileFingerprint>& fingerprints) {
  std::string text = kEncodingVersion;
  for (const FileFingerprint& file : fingerprints) {
    text += c10::str(' ', file.bytes, ' ', file.xxh3);
  }
  for (size_t i = 0; i < source.paths.size(); ++i) {
    if (format_of(source, source.paths[i]) == "jsonl") {
      text += c10::str(" file ", i, " has ", source.field);
    }
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
      fingerprint_of("the tokenizer", source.tokenizer->identity()));
  if (is_chat(source)) {
    text.fingerprints.push_back(
        fingerprint_of("the chat template", detail::describe(source.chat)));
  }
  text.key = key_of(source, text.fingerprints);
  text.cache_path = (fs::path(source.cache_folder) /
                     ("tokens-" + to_hex(text.key) + ".cache"))
                        .string();
  return text;
}

// The token that ends a document, where documents are kept apart.
std::optional<int64_t> separator_of(const TokenSource& source) {
  if (!source.documents_apart) return std::nullopt;
  TS_CHECK_CONFIG(source.tokenizer != nullptr, source.paths[0],
                  ": data.intra_document_masking needs to know which token "
                  "ends a document: set data.tokenizer (of eval: "
                  "--tokenizer).");
  const auto end = source.tokenizer->end_of_text();
  TS_CHECK_CONFIG(end.has_value(),
                  "data.intra_document_masking: the tokenizer has no token "
                  "that ends a document (",
                  kEndsOfText, "). Add one to it, or leave the key out.");
  return end;
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

bool is_text(const TokenSource& source) {
  TS_CHECK_CONFIG(!source.paths.empty(),
                  "there are no files to read tokens "
                  "from.");
  const bool first = is_document(format_of(source, source.paths[0]));
  for (const std::string& path : source.paths) {
    TS_CHECK_CONFIG(
        is_document(format_of(source, path)) == first, source.paths[0],
        first ? " is text" : " has tokens", " and ", path,
        first ? " has tokens" : " is text",
        ": give files of one kind, each kind a weight by data.weights, or "
        "leave files out by data.exclude.");
  }
  return first;
}

bool is_chat(const TokenSource& source) {
  const auto is_one = [&](const std::string& path) {
    return format_of(source, path) == "chat";
  };
  const bool first = is_one(source.paths[0]);
  for (const std::string& path : source.paths) {
    TS_CHECK_CONFIG(is_one(path) == first, first ? source.paths[0] : path,
                    " has conversations, and ", first ? path : source.paths[0],
                    " has none. Give files of one kind, or set data.format.");
  }
  return first;
}

TokenStream::TokenStream(std::vector<TokenFile> files,
                         std::vector<FileFingerprint> fingerprints, Marks marks)
    : files_(std::move(files)),
      starts_{0},
      fingerprints_(std::move(fingerprints)),
      marks_(std::move(marks)) {
  for (const TokenFile& file : files_) {
    starts_.push_back(starts_.back() + file.size());
  }
}

std::vector<FileFingerprint> TokenStream::caches() const {
  std::vector<FileFingerprint> all;
  const auto add = [&](const TokenFile& file) {
    if (file.format() != "cache") return;
    all.insert(all.end(), file.fingerprints().begin(),
               file.fingerprints().end());
  };
  for (const TokenFile& file : files_) add(file);
  if (marks_.chats) add(*marks_.chats);
  return all;
}

void TokenStream::in_files(int64_t first, int64_t count,
                           const InFile& in_file) const {
  TORCH_INTERNAL_ASSERT(first >= 0 && count <= size() - first, "tokens ", first,
                        " + ", count, " of ", size());
  size_t i = std::upper_bound(starts_.begin(), starts_.end(), first) -
             starts_.begin() - 1;
  for (int64_t done = 0; done < count; ++i) {
    const int64_t at = first + done;
    const int64_t here = std::min(count - done, starts_[i + 1] - at);
    in_file(files_[i], at - starts_[i], here, done);
    done += here;
  }
}

void TokenStream::read(int64_t first, std::span<int64_t> out) const {
  in_files(first, static_cast<int64_t>(out.size()),
           [&](const TokenFile& file, int64_t begin, int64_t count,
               int64_t done) { file.read(begin, out.subspan(done, count)); });
}

void TokenStream::will_need(int64_t first, int64_t count) const {
  in_files(first, count,
           [](const TokenFile& file, int64_t begin, int64_t here,
              int64_t /*done*/) { file.will_need(begin, here); });
  if (marks_.chats) marks_.chats->will_need(first, count);
}

void TokenStream::hide_uncounted(int64_t first,
                                 std::span<int64_t> targets) const {
  if (!marks_.chats) return;
  std::vector<int64_t> marks(targets.size());
  marks_.chats->read(first, marks);
  for (size_t i = 0; i < marks.size(); ++i) {
    if ((marks[i] & detail::kCounts) == 0) targets[i] = kIgnoreIndex;
  }
}

void TokenStream::document_starts(int64_t first,
                                  std::span<int64_t> starts) const {
  std::ranges::fill(starts, 0);
  if (!documents_apart()) return;
  std::vector<int64_t> known(starts.size());
  if (marks_.chats) {
    marks_.chats->read(first, known);
  } else {
    read(first, known);
  }
  const auto begins = [&](size_t i) {
    return marks_.chats ? (known[i] & detail::kBegins) != 0
                        : known[i - 1] == *marks_.separator;
  };
  for (size_t i = 1; i < starts.size(); ++i) {
    starts[i] = begins(i) ? static_cast<int64_t>(i) : starts[i - 1];
  }
}

namespace {

bool is_whole(const TokenSource& source, const TextSource& text) {
  const auto whole = [&](const std::string& path) {
    return fs::exists(path) && detail::is_cache_of(MappedFile(path), text.key);
  };
  return whole(text.cache_path) &&
         (!is_chat(source) || whole(marks_path(text.cache_path)));
}

void prepare_chats(const TokenSource& source, const TextSource& text,
                   detail::CacheWriter& ids) {
  detail::CacheWriter marks(marks_path(text.cache_path), text.key,
                            IdType::kU16);
  detail::write_chat_samples({.paths = source.paths,
                              .form = source.chat,
                              .tokenizer = *source.tokenizer,
                              .threads = source.threads},
                             ids, marks);
  marks.commit();
}

void write_cache(const TokenSource& source, const TextSource& text) {
  const IdType type =
      source.tokenizer->vocab_size() <= (1 << 16) ? IdType::kU16 : IdType::kU32;
  detail::CacheWriter cache(text.cache_path, text.key, type);
  if (is_chat(source)) {
    prepare_chats(source, text, cache);
    return cache.commit();
  }
  detail::tokenize_documents({.paths = source.paths,
                              .form = {source.format, source.field},
                              .tokenizer = *source.tokenizer,
                              .threads = source.threads},
                             cache);
  TS_CHECK_CONFIG(cache.count() > 0, source.paths[0],
                  source.paths.size() > 1 ? " and what is with it" : "",
                  ": has no text.");
  cache.commit();
}

}  // namespace

int64_t prepare_tokens(const TokenSource& source) {
  if (!is_text(source)) {
    separator_of(source);
    int64_t count = 0;
    for (const std::string& path : without_indexes(source)) {
      const TokenFile file(path, source.format, source.vocab_size);
      file.check_ids();
      count += file.size();
    }
    return count;
  }
  const TextSource text = text_source(source);
  if (!is_chat(source)) separator_of(source);
  detail::remove_leftovers(source.cache_folder);
  const bool exists = fs::exists(text.cache_path);
  if (!exists || !is_whole(source, text)) {
    if (exists) {
      log::warning(text.cache_path,
                   " is damaged: the text is tokenized again.");
    }
    write_cache(source, text);
  }
  return TokenFile(text.cache_path, "cache", source.vocab_size).size();
}

TokenStream open_tokens(const TokenSource& source) {
  std::vector<TokenFile> files;
  std::vector<FileFingerprint> fingerprints;
  if (is_text(source)) {
    TextSource text = text_source(source);
    TS_CHECK_IO(is_whole(source, text), text.cache_path,
                ": is no cache of the text. Was the text changed, or "
                "the cache not prepared?");
    files.emplace_back(text.cache_path, "cache", source.vocab_size);
    TokenStream::Marks marks;
    if (is_chat(source)) {
      marks.chats.emplace(marks_path(text.cache_path), "cache",
                          detail::kNumChatMarks);
      marks.chats_apart = source.chat.packing;
    } else {
      marks.separator = separator_of(source);
    }
    return {std::move(files), std::move(text.fingerprints), std::move(marks)};
  }
  for (const std::string& path : without_indexes(source)) {
    files.emplace_back(path, source.format, source.vocab_size);
    const auto& more = files.back().fingerprints();
    fingerprints.insert(fingerprints.end(), more.begin(), more.end());
  }
  const auto separator = separator_of(source);
  if (separator.has_value()) {
    fingerprints.push_back(
        fingerprint_of("the tokenizer", source.tokenizer->identity()));
  }
  return {std::move(files), std::move(fingerprints), {.separator = separator}};
}

}  // namespace tessera::data
